"""Find tensors in nested arguments and results, and replace them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["PLAIN", "map_tensors", "samples_in", "tensors_in"]

PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of which most values that hold no tensor are."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and mappings, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with the tensors in its lists, tuples and dicts replaced; itself if none is."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is list or isinstance(value, tuple):
        items = [item if type(item) in PLAIN else map_tensors(change, item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return items if kind is list else value._make(items) if hasattr(value, "_make") else tuple(items)
    if kind is dict:
        found = {key: map_tensors(change, item) for key, item in value.items()}
        return value if all(found[key] is item for key, item in value.items()) else found
    return value


def samples_in(value: Any) -> int | None:
    """Return how many samples a batch has: the first dimension of its first tensor that has one."""
    try:
        first = next((tensor for tensor in tensors_in(value) if tensor.dim()), None)
        return None if first is None else int(first.shape[0])
    except (RuntimeError, TypeError, NotImplementedError):  # tensors that have no such dimension: nested, symbolic
        return None
