"""Find tensors in nested arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and mappings, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
