"""Encode the spans of pipelines. Text that is the same in each step is made once and kept as a template.

The line of a task is followed by the ends of its arrows, which show where a micro-batch comes from and goes to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from pipesight.trace._span_events import Args, Place

__all__ = ["PlaceLines", "carried"]

_Template: TypeAlias = Callable[[Any, int, Args], str]
"""Makes the line of a node, a thread and arguments, with a ``%d`` for each of: ID, start, duration, parent, level."""

_NUMBERS = ("step", "minibatch", "microbatch")
_MANY = 10_000


_carried: dict[tuple[Any, ...], tuple[Args, Args]] = {}


def carried(node: Any, known: Args) -> Args:
    """Return the arguments of a node and further ones: the same object every time, so that its line is made once."""
    key = (node, *known.items())
    entry = _carried.get(key)
    if entry is None or entry[0] is not node.args:
        if len(_carried) > _MANY:
            _carried.clear()
        entry = _carried[key] = (node.args, {**node.args, **known})
    return entry[1]


class PlaceLines:
    """Makes the lines of spans with a `Place`, and keeps their templates.

    ``arrow`` makes the line of one end of an arrow in a thread, with a ``%d`` for ID and time.
    """

    def __init__(self, template: _Template, arrow: Callable[[str, int], str]) -> None:
        self._template, self._arrow = template, arrow
        self._lines: defaultdict[int, dict[Any, tuple[Args, bytes]]] = defaultdict(dict)
        self._arrows: dict[tuple[str, int], bytes] = {}

    def forget(self, thread: int) -> None:
        """Drop what was kept for a thread: its number belongs to another one from now on."""
        self._lines.pop(thread, None)
        self._arrows.pop(("s", thread), None)
        self._arrows.pop(("f", thread), None)

    def of(self, thread: int) -> dict[Any, tuple[Args, bytes]]:
        """Return a thread's lines of `make`, with the node's arguments, by node, partition and layer."""
        return self._lines[thread]

    def make(self, node: Any, thread: int, place: Place) -> bytes:
        """Make and keep a line: a ``%d`` for ID, start, duration, parent, step, mini-batch, micro-batch and level."""
        carried, _, _, _, partition, _, layer, _, _ = place
        known = {**carried, "step": 0, "minibatch": 0, "partition": partition, "microbatch": 0}
        if layer is not None:
            known["layer"] = layer
        # The three numbers come first, in this order, whatever other arguments there are.
        others = {name: value for name, value in known.items() if name not in _NUMBERS}
        marked = {**{name: f"\0{name}" for name in _NUMBERS}, **others}
        text = self._template(node, thread, marked)
        for name in _NUMBERS:
            text = text.replace(f'"\\u0000{name}"', "%d")
        lines = self._lines[thread]
        if len(lines) > _MANY:
            lines.clear()
        line = text.encode()
        lines[node, partition, layer] = (carried, line)
        return line

    def arrows(self, thread: int, place: Place, begin: int, salt: int) -> list[bytes]:
        """Return the ends of the arrows into and out of a task: a micro-batch's way through the partitions and back.

        In a pipeline over several processes, the other end is in another file. Otherwise ``salt`` makes sure that
        arrows of different files do not match.
        """
        _, way, _, minibatch, partition, microbatch, _, partitions, pipe = place
        salt = pipe or salt
        # A number for a micro-batch's way out of a partition; viewers keep 53 bits of it.
        direction = minibatch % 2**24 * 2 + (way < 0)
        microbatch_way = (direction * 2**16 + microbatch % 2**16) * 2**12
        ends = []
        for end, there, source in (("f", partition - way, partition - way), ("s", partition + way, partition)):
            if 0 <= there < partitions:
                text = self._arrows.get((end, thread))
                if text is None:
                    text = self._arrows[end, thread] = self._arrow(end, thread).encode()
                ends.append(text % (microbatch_way + source % 2**12 ^ salt, begin))
        return ends
