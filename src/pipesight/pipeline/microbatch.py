"""Split a mini-batch into micro-batches, and concatenate their outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Form", "TensorOrTensors", "as_tuple", "form_of", "gather", "lone", "scatter"]

TensorOrTensors: TypeAlias = Tensor | tuple[Tensor, ...]

Form: TypeAlias = Callable[[Sequence[Tensor | None]], Any]
"""Makes a lone tensor or a tuple, of the right class, of a list of tensors."""

lone: Form = operator.itemgetter(0)


def form_of(value: TensorOrTensors) -> Form:
    """Return what makes a value like ``value`` of its tensors; named tuples keep their names."""
    if isinstance(value, Tensor):
        return lone
    if hasattr(value, "n_sequence_fields"):  # what torch.max and others return
        return type(value)
    return getattr(value, "_make", tuple)


def as_tuple(value: object, what: str) -> tuple[Tensor, ...]:
    """Return the tensors of a ``Tensor`` or ``tuple[Tensor, ...]``, or raise ``TypeError``."""
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, tuple):
        raise TypeError(f"{what} must be a Tensor or a tuple of Tensors, but got {type(value).__name__}")
    for position, item in enumerate(value):
        if not isinstance(item, Tensor):
            raise TypeError(
                f"{what} must be a Tensor or a tuple of Tensors, "
                f"but item {position} of the tuple is {type(item).__name__}"
            )
    return value


def scatter(tensors: tuple[Tensor, ...], chunks: int) -> list[tuple[Tensor, ...]]:
    """Split each tensor along its first dimension as ``torch.chunk`` does: at most ``chunks`` micro-batches.

    A batch smaller than ``chunks`` gives one micro-batch per sample, an empty one a single empty micro-batch.
    """
    if not tensors:
        raise ValueError("input must hold at least one Tensor, but got an empty tuple")
    if any(t.dim() == 0 for t in tensors):
        raise ValueError("input must have a batch dimension to be split into micro-batches, but got a 0-d Tensor")
    sizes = [t.size(0) for t in tensors]
    if len(set(sizes)) > 1:
        raise ValueError(f"all input tensors must have the same batch size (first dimensions: {sizes})")
    if sizes[0] == 0:
        return [tensors]
    return list(zip(*(t.chunk(chunks) for t in tensors), strict=True))


def gather(outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate the outputs of all micro-batches along the first dimension."""
    counts = {len(output) for output in outputs}
    if len(counts) > 1:
        raise RuntimeError(f"all micro-batches must return the same number of outputs, but returned {sorted(counts)}")
    if any(t.dim() == 0 for output in outputs for t in output):
        raise RuntimeError(
            "the output must have a batch dimension to be concatenated from micro-batches, but a layer returned a 0-d "
            "Tensor; compute the loss outside the pipeline"
        )
    if len(outputs) == 1:
        return [t.detach() for t in outputs[0]]
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]
