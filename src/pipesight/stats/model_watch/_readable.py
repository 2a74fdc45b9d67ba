"""The tensors in the arguments and results of a layer, and which of them have numbers to be read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipesight._nested import tensors_in
from pipesight._torch.tensors import is_fake, is_instance, is_transformed

__all__ = ["has_values", "numbers"]


def numbers(value: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result; masks and indices only where there is nothing else."""
    if type(value) is Tensor:
        return [value]
    tensors = list(tensors_in(value))
    return [t for t in tensors if t.is_floating_point() or t.is_complex()] or tensors


def has_values(tensor: Tensor) -> bool:
    """Whether there are real numbers to be read; complex ones, sums not done and those of a trace are none."""
    return not (
        tensor.is_complex()
        or tensor.is_meta
        or is_transformed(tensor)
        or is_fake(tensor)
        or is_instance(tensor, "torch.nn.parameter", "UninitializedTensorMixin")
        or any(placement.is_partial() for placement in getattr(tensor, "placements", ()))
    )
