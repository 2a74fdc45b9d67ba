"""Record copies from device to device, with their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipesight._patches import Patches, harmless
from pipesight._torch.tensors import without_function_overrides
from pipesight.trace import _span_events
from pipesight.trace._span_events import begin, end, now, past, remove
from pipesight.trace.ai import ai
from pipesight.trace.automatic._step_argument import with_step

__all__ = ["instrument_transfers"]


def instrument_transfers(patches: Patches) -> None:
    """Record ``device.transfer`` for ``to``, ``cuda`` and ``cpu`` of tensors and modules."""
    for name in ("to", "cuda", "cpu"):
        patches.wrap(torch.Tensor, name, _move_tensor, may_raise=True)  # a call for each parameter is common
        patches.wrap(nn.Module, name, _move_module)


def _move_tensor(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    start = now()
    moved = original(tensor, *args, **kwargs)
    if moved is not tensor:  # in most calls, it was there already
        _record(tensor, moved, start)
    return moved


@harmless
def _record(tensor: Tensor, moved: Any, start: int) -> None:
    moment, node = now(), ai.device.transfer
    if not node.recording or _span_events.current()[0] is node:  # of a module, which is one span
        return
    with without_function_overrides():
        if isinstance(moved, Tensor) and moved.device != tensor.device:  # torch.fx returns a proxy
            known = {"from": str(tensor.device), "to": str(moved.device), "size": _size(tensor)}
            past(node, start, moment, with_step(node.args, **known))


def _move_module(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    node = ai.device.transfer
    if not node.recording:
        return original(module, *args, **kwargs)
    before = _places(module)
    span = begin(node)
    try:
        return original(module, *args, **kwargs)
    finally:
        copied = [
            (old, new, size) for (old, _), (new, size) in zip(before, _places(module), strict=False) if old != new
        ]
        if copied:
            size = sum(size for *_, size in copied)
            end(span, with_step(node.args, **{"from": str(copied[0][0]), "to": str(copied[0][1]), "size": size}))
        else:
            remove(span)


def _places(module: nn.Module) -> list[tuple[torch.device, int]]:
    with without_function_overrides():
        return [(tensor.device, _size(tensor)) for tensor in (*module.parameters(), *module.buffers())]


def _size(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) else tensor.nelement() * tensor.element_size()
