"""``torchgpipe.microbatch``, for pipesight: micro-batches, how to cut and join them, and which one is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast, overload

import torch
from torch import Tensor

from pipesight import current_microbatch
from pipesight.pipeline.microbatch import TensorOrTensors, as_tuple

__all__ = ["Batch", "TensorOrTensors", "check", "current_microbatch", "gather", "scatter"]


class Batch:
    """A tensor or a tuple of tensors, as one sequence that can be changed.

    Example::

        batch = Batch(tensor)
        batch[0] = batch[0].relu()
        output = batch.call(layer).tensor
    """

    def __init__(self, value: TensorOrTensors) -> None:
        self.value = value
        """The tensor, or the tuple."""
        self.atomic = isinstance(value, Tensor)
        """Whether it is a single tensor that is in no tuple."""

    @property
    def tensor(self) -> Tensor:
        """The tensor of an atomic batch."""
        if not self.atomic:
            raise AttributeError(f"a batch of {len(self)} tensors in a tuple is not atomic; use batch.tensors")
        return cast(Tensor, self.value)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tuple of a batch that is not atomic."""
        if self.atomic:
            raise AttributeError("the batch is atomic, a single tensor; use batch.tensor")
        return cast(tuple[Tensor, ...], self.value)

    @property
    def tensor_or_tensors(self) -> TensorOrTensors:
        """What the batch was made of."""
        return self.value

    def call(self, function: Callable[[TensorOrTensors], TensorOrTensors]) -> Batch:
        """Return the batch of what ``function`` returns for the tensor or the tuple."""
        return Batch(function(self.value))

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all())

    def __getitem__(self, index: int) -> Tensor:
        self._check_index(index)
        return self._all()[index]

    @overload
    def __setitem__(self, index: int, value: Tensor) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: tuple[Tensor, ...]) -> None: ...
    def __setitem__(self, index: int | slice, value: TensorOrTensors) -> None:
        if index == slice(None):
            tensors = as_tuple(tuple(value), "a batch")
        elif isinstance(index, slice):
            raise NotImplementedError(f"only batch[:] can be assigned as a slice, but got {index}")
        else:
            self._check_index(index)
            replaced = list(self._all())
            replaced[index] = cast(Tensor, value)
            tensors = tuple(replaced)
        if self.atomic and len(tensors) != 1:
            raise IndexError(f"an atomic batch holds one tensor and cannot be replaced by {len(tensors)}")
        self.value = tensors[0] if self.atomic else tensors

    def _all(self) -> tuple[Tensor, ...]:
        return (self.tensor,) if self.atomic else self.tensors

    def _check_index(self, index: int) -> None:
        if self.atomic and index != 0:
            raise IndexError(f"an atomic batch has the index 0 alone (index: {index})")


def check(input: object) -> None:
    """Raise ``TypeError`` unless ``input`` is a tensor or a tuple of tensors."""
    as_tuple(input, "input")


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Cut a mini-batch into at most ``chunks`` micro-batches along the first dimension, each tensor by itself."""
    if isinstance(input, Tensor):
        return [Batch(part) for part in input.chunk(chunks)]
    return [Batch(parts) for parts in zip(*(tensor.chunk(chunks) for tensor in input), strict=False)]


def gather(outputs: list[Batch]) -> TensorOrTensors:
    """Concatenate micro-batches along the first dimension."""
    if outputs[0].atomic:
        return torch.cat([batch.tensor for batch in outputs])
    return tuple(torch.cat(parts) for parts in zip(*(batch.tensors for batch in outputs), strict=True))
