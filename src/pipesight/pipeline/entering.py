"""Replace the tensors in the arguments of a module, and let what it does to lists and mappings reach the caller's.

A list that holds tensors of another partition is copied, with others in their place. A block may append to it, in a
model that passes a list of states from block to block. So the copies are compared with what was passed, and what has
changed is done to the caller's list, too.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from pipesight._nested import PLAIN

__all__ = ["EnteredArguments"]


class EnteredArguments:
    """The arguments of one call.

    ::

        entered = EnteredArguments(change)
        args, kwargs = entered.enter_call(args, kwargs)
        module(*args, **kwargs)
        entered.leave()

    Args:
        change: Returns what a tensor is replaced by, maybe itself.
    """

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self._change = change
        self._copies: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []  # the caller's, the copy, what was in it
        self._originals: dict[int, tuple[Any, Any]] = {}  # by id: what was passed, and what it stands for

    def enter_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with their tensors replaced."""
        enter = self.enter
        entered = tuple([item if type(item) in PLAIN else enter(item) for item in args])
        return entered, {key: item if type(item) in PLAIN else enter(item) for key, item in kwargs.items()}

    def enter(self, value: Any) -> Any:
        """Return a value with its tensors replaced; the value itself if none is."""
        if isinstance(value, Tensor):
            return self._stands(self._change(value), value)
        if isinstance(value, tuple):
            items = [item if type(item) in PLAIN else self.enter(item) for item in value]
            if all(map(operator.is_, items, value)):
                return value
            return self._stands(value._make(items) if hasattr(value, "_make") else tuple(items), value)
        if not isinstance(value, (list, Mapping)) and not _is_dataclass(value):
            return value
        if known := next((copied for original, copied, _ in self._copies if original is value), None):
            return known
        pairs = _pairs(value)
        changed = [(key, new) for key, old in pairs if type(old) not in PLAIN and (new := self.enter(old)) is not old]
        return self._copied(value, changed) if changed else value

    def leave(self) -> None:
        """Do to the caller's lists, mappings and dataclasses what the call has done to its copies."""
        for original, copied, before in self._copies:
            after = _pairs(copied)
            if len(before) != len(after) or any(
                old[0] != new[0] or old[1] is not new[1] for old, new in zip(before, after, strict=True)
            ):
                _fill(original, [(key, self._originals.get(id(item), (0, item))[1]) for key, item in after])
        self._copies, self._originals = [], {}

    def _stands(self, new: Any, old: Any) -> Any:
        if new is not old:
            self._originals[id(new)] = (new, old)
        return new

    def _copied(self, value: Any, changed: list[tuple[Any, Any]]) -> Any:
        if _is_dataclass(value) and value.__dataclass_params__.frozen:
            return self._stands(dataclasses.replace(value, **dict(changed)), value)
        if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
            return self._stands({**value, **dict(changed)}, value)
        copied = copy.copy(value)
        _set(copied, changed)
        self._copies.append((value, copied, _pairs(copied)))
        return self._stands(copied, value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """Return what is in a list, mapping or dataclass, and under which key."""
    if isinstance(value, list):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]


def _set(value: Any, pairs: list[tuple[Any, Any]]) -> None:
    for key, item in pairs:
        if isinstance(value, (list, MutableMapping)):
            value[key] = item
        else:
            setattr(value, key, item)


def _fill(value: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Put other things into a list, mapping or dataclass."""
    if isinstance(value, list):
        value[:] = [item for _, item in pairs]
        return
    if isinstance(value, MutableMapping):
        for key in value.keys() - {key for key, _ in pairs}:
            del value[key]
    _set(value, pairs)
