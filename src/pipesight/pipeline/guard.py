"""Tensors that can be looked at but not differentiated, since their graph cannot be reached from where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipesight._torch.autograd import is_of_function
from pipesight.pipeline.flattening import flatten

__all__ = ["guard", "guard_all"]


class _Guard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, why: str) -> Tensor:
        ctx.why = why
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(ctx.why)


def guard(tensor: Tensor, why: str) -> Tensor:
    """Return a tensor with the same values whose backward raises ``RuntimeError``; itself if it has no graph."""
    if tensor.grad_fn is None or is_of_function(tensor.grad_fn, _Guard):
        return tensor
    with torch.enable_grad():
        guarded: Tensor = _Guard.apply(tensor.detach().requires_grad_(), why)  # type: ignore[no-untyped-call]
    return guarded


def guard_all(value: Any, why: str) -> Any:
    """Return a value with all tensors in it guarded; itself if none has a graph."""
    flat = flatten(value)
    if all(tensor.grad_fn is None for tensor in flat.tensors):
        return value
    return flat.rebuild([guard(tensor, why) for tensor in flat.tensors])
