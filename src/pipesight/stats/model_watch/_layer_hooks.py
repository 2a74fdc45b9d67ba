"""The hooks of watched layers: there in the steps that are logged, gone in all others, which then cost nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

from pipesight._torch.module_internals import forward_hook_tables
from pipesight.stats.model_watch._hook import Hook

__all__ = ["LayerHooks"]

_first_keys = itertools.count(-(1 << 40), 16)  # below 0: torch gives away the others


@dataclass(slots=True)
class _Place:
    """Where a hook belongs: in a table, after certain others."""

    table: dict[int, Hook]
    key: int
    hook: Hook
    handle: RemovableHandle | None = None
    after: frozenset[int] = field(default_factory=frozenset)

    def take_out(self) -> None:
        keys = list(self.table)
        if self.key in keys:
            self.after = frozenset(keys[: keys.index(self.key)])
            del self.table[self.key]

    def put_back(self) -> None:
        others = list(self.table.items())
        self.table[self.key] = self.hook
        if others:  # some may have been added or removed meanwhile
            at = 1 + max((i for i, (key, _) in enumerate(others) if key in self.after), default=-1)
            for key, hook in others[at:]:
                del self.table[key]
                self.table[key] = hook


class LayerHooks:
    """Puts hooks on layers, takes them off for a while, and puts them back where they were among others.

    Attributes:
        on: Whether they are there.
    """

    def __init__(self) -> None:
        self.on = True
        self._places: list[_Place] = []
        self._first_key = next(_first_keys)
        self._counts: Counter[int] = Counter()  # of hooks in a table

    def before(self, layer: nn.Module, hook: Hook) -> None:
        """Call a hook with the arguments and keyword arguments that a layer is given."""
        handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
        self._places.append(_Place(forward_hook_tables(layer)[1], handle.id, hook, handle))

    def after(self, layer: nn.Module, hook: Hook) -> None:
        """Call a hook with what a layer returns."""
        table = forward_hook_tables(layer)[0]
        # The same key for all layers: compiled code is valid for certain keys only, and layers of a kind share it.
        place = _Place(table, self._first_key + self._counts[id(table)], hook)
        self._counts[id(table)] += 1
        self._places.append(place)
        table[place.key] = hook

    def replace(self, hook: Hook, other: Hook) -> None:
        """Call another hook in the place of one."""
        for place in self._places:
            if place.hook is hook:
                place.hook = other
                if place.key in place.table:
                    place.table[place.key] = other

    def turn(self, *, on: bool) -> None:
        """Have the hooks called, or not."""
        if on == self.on:
            return
        self.on = on
        if on:
            for place in self._places:
                place.put_back()
        else:
            for place in reversed(self._places):
                place.take_out()

    def remove(self) -> None:
        """Take all hooks off, for good."""
        for place in self._places:
            place.table.pop(place.key, None)
            if place.handle is not None:
                place.handle.remove()
            place.hook.stop()
        self._places.clear()
