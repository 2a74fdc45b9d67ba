"""Convert arguments of spans to what JSON can hold, at once: the program may change the values later."""

from __future__ import annotations

import enum
import math
import os
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

__all__ = ["named_args", "plain", "plain_args"]

_LONGEST = 64 * 1024  # characters of a string
_DEEPEST = 8
_MOST = 1000  # entries of lists and mappings, all in all
_INT64 = 1 << 63


def plain_args(args: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping of strings to values that JSON can hold.

    >>> plain_args({"lr": 0.1, "loss": float("nan"), "where": pathlib.Path("/data")})
    {'lr': 0.1, 'loss': 'NaN', 'where': '/data'}
    """
    return {key if type(key) is str else _key(key): plain(value) for key, value in args.items()}


def named_args(
    epoch: int | None, step: int | None, image_idx: int | None, image_size: Any, args: Mapping[Any, Any] | None
) -> dict[str, Any]:
    """Return the arguments that the conventions name, without those that are ``None``, and ``args``."""
    named = {"epoch": epoch, "step": step, "image_idx": image_idx, "image_size": image_size}
    return plain_args({**{name: value for name, value in named.items() if value is not None}, **(args or {})})


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: tensors as shape and dtype, others as their ``repr``, shortened."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_INT64 <= value < _INT64 else str(value) if abs(value) < 10**1000 else _shorten(hex(value))
    if kind is float:
        return value if math.isfinite(value) else "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if kind is str:
        return _shorten(value)
    return _Walk().plain(value, 0)


class _Walk:
    """Converts one nested value, up to a limited depth and number of entries."""

    def __init__(self) -> None:
        self._entries_left = _MOST

    def plain(self, value: Any, depth: int) -> Any:
        if type(value) in _SIMPLE:
            return plain(value)
        try:
            return self._known(value, depth)
        except Exception as error:  # raised by the user's class
            return f"<{type(value).__name__}: {type(error).__name__}>"

    def _known(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return plain(value.value) if type(value.value) in _SIMPLE else value.name
        if isinstance(value, int):
            return plain(int(value))
        if isinstance(value, float):
            return plain(float(value))
        if isinstance(value, str):
            return _shorten(str.__str__(value))
        if isinstance(value, os.PathLike):
            return _shorten(os.fsdecode(value))
        if depth < _DEEPEST and not isinstance(value, (type, bytes, bytearray, memoryview)):
            if hasattr(value, "dtype") and hasattr(value, "shape"):  # torch, numpy, jax
                return self._array(value, depth + 1)
            if isinstance(value, Mapping):
                return self._mapping(value, depth + 1)
            if isinstance(value, (Sequence, Set)):
                return self._entries(value, depth + 1)
        return f"{type(value).__name__} in {depth} others" if depth >= _DEEPEST else _shorten(repr(value))

    def _array(self, value: Any, depth: int) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            # We would have to wait for a value on a GPU, or on several.
            scalar = (
                value.dim() == 0 and value.device.type == "cpu" and type(value) in (torch.Tensor, torch.nn.Parameter)
            )
        else:
            scalar = value.shape == () and hasattr(value, "item")
        if scalar and (item := value.item()) is not value:
            return self.plain(item, depth)
        shape = [self.plain(size, depth) for size in value.shape]
        return {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, item in value.items():
            if not self._entries_left:
                entries["..."] = f"{len(value)} entries"
                break
            self._entries_left -= 1
            entries[key if type(key) is str else _key(key)] = self.plain(item, depth)
        return entries

    def _entries(self, value: Sequence[Any] | Set[Any], depth: int) -> list[Any]:
        entries: list[Any] = []
        for item in value:
            if not self._entries_left:
                entries.append(f"... ({len(value)} entries)")
                break
            self._entries_left -= 1
            entries.append(self.plain(item, depth))
        return entries


_SIMPLE = frozenset({type(None), bool, int, float, str})


def _key(key: Any) -> str:
    """Return a key as a string, converted as a value would be."""
    text = plain(key)
    return text if type(text) is str else str(text)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
