"""Copies from device to device, with their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipesight.trace import _span
from pipesight.trace._span import begin, end, now, past, remove
from pipesight.trace.ai import ai
from pipesight.trace.automatic._patch import Patches
from pipesight.trace.automatic._step import with_step

__all__ = ["instrument_transfers"]


def instrument_transfers(patches: Patches) -> None:
    """Record ``device.transfer`` for ``Tensor.to`` and ``Module.to``, and for their relatives."""
    for name in ("to", "cuda", "cpu"):
        patches.wrap(torch.Tensor, name, _move_tensor)
        patches.wrap(nn.Module, name, _move_module)


def _move_tensor(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    node = ai.device.transfer
    if _span.is_compiling() or not node.recording or _span.current()[0] is node:  # a module's, with all its tensors
        return original(tensor, *args, **kwargs)
    start = now()
    moved = original(tensor, *args, **kwargs)
    if moved.device != tensor.device:
        size = tensor.nelement() * tensor.element_size()
        past(
            node,
            start,
            now(),
            with_step(node.args, **{"from": str(tensor.device), "to": str(moved.device), "size": size}),
        )
    return moved


def _move_module(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    node = ai.device.transfer
    if _span.is_compiling() or not node.recording:
        return original(module, *args, **kwargs)
    before = [t.device for t in _tensors(module)]
    span = begin(node)
    try:
        return original(module, *args, **kwargs)
    finally:
        copied = [(old, t) for old, t in zip(before, _tensors(module), strict=False) if t.device != old]
        if copied:
            source, first = copied[0]
            size = sum(t.nelement() * t.element_size() for _, t in copied)
            end(span, with_step(node.args, **{"from": str(source), "to": str(first.device), "size": size}))
        else:
            remove(span)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
