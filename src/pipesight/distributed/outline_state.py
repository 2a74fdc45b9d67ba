"""What the first call of a model leaves in it for later ones, such as a table of positions that it makes when missing.

The outline of a model has it after a first call, and makes other calls of torch from then on. The model itself takes it
over, so that its first call already goes as later ones do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipesight._nested import tensors_in

__all__ = ["OutlineState"]

_Entries = dict[tuple[int, bool, str], Any]


class OutlineState:
    """The attributes and buffers of an outline before a first call.

    ``pairs`` are the modules of the outline, each with that of the model.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self._pairs = pairs
        self._before = self._entries()
        self._after: _Entries = {}

    def note(self) -> None:
        """Note what is there after the first call."""
        now = self._entries()
        self._after = {key: value for key, value in now.items() if not self._is_in(self._before, key, value)}

    def take_over(self) -> bool:
        """Let the model have what the first call has left and the second has not changed; return whether there is any.

        Not what depends on activations, whose values an outline does not know.
        """
        now, found = self._entries(), False
        for key, value in self._after.items():
            if self._is_in(now, key, value) and not any(tensor.is_meta for tensor in tensors_in(value)):
                k, is_buffer, name = key
                theirs = self._pairs[k][1]
                (theirs._buffers if is_buffer else vars(theirs))[name] = copy.deepcopy(value)
                found = True
        return found

    def _entries(self) -> _Entries:
        found: _Entries = {}
        for k, (module, _) in enumerate(self._pairs):
            found.update(((k, True, name), buffer) for name, buffer in module._buffers.items())
            found.update(
                ((k, False, name), copy.copy(value) if isinstance(value, (list, dict)) else value)
                for name, value in vars(module).items()
                if _is_plain(value) and name not in _OF_TORCH
            )
        return found

    @staticmethod
    def _is_in(entries: _Entries, key: tuple[int, bool, str], value: Any) -> bool:
        if key not in entries:
            return False
        return _is_same(value, entries[key])


_OF_TORCH = frozenset(vars(nn.Module()))


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, (bool, int, float, str)) and one == other)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, Tensor)) or type(value) in (tuple, list, dict)
