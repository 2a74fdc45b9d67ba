"""One use of an event, with arguments of its own: ``ai.compute.forward(args={"layer": 3})``."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pipesight.trace import _span_events
from pipesight.trace._args import named_args
from pipesight.trace._loop import Loop
from pipesight.trace._recording_switch import ALWAYS, NEVER, Switch
from pipesight.trace._span_events import Args, begin, begin_silently, end_innermost
from pipesight.trace._wrap import wrap

if TYPE_CHECKING:
    from pipesight.trace.node import Node

__all__ = ["Use"]

F = TypeVar("F")
T = TypeVar("T")


class Use:
    """One use of an event, with arguments of its own: ``ai.compute.forward(args={"layer": 3})``.

    A decorator, a context manager, and, by `iter`, a wrapper for loops.

    Attributes:
        name: That of the event.
        category: That of the event.
    """

    __slots__ = ("_enable", "_node", "_own", "category", "name")

    phase = "X"

    def __init__(
        self,
        node: Node,
        *,
        args: Args | None = None,
        epoch: int | None = None,
        step: int | None = None,
        image_idx: int | None = None,
        image_size: int | None = None,
        enable: bool | None = None,
    ) -> None:
        self._node, self._enable = node, enable
        self._own = named_args(epoch, step, image_idx, image_size, args)
        self.name, self.category = node.name, node.category

    @property
    def recording(self) -> bool:
        """Whether a span that begins now is recorded."""
        return self.switch.recording

    @property
    def switch(self) -> Node | Switch:
        """What decides whether this use is recorded."""
        return self._node if self._enable is None else ALWAYS if self._enable else NEVER

    @property
    def args(self) -> Args:
        """The event's current arguments and those of this use."""
        return {**self._node.args, **self._own} if self._own else self._node.args

    def __enter__(self) -> Use:
        if not _span_events.is_compiling():
            if self.recording:
                begin(self)
            else:
                begin_silently(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not _span_events.is_compiling():
            end_innermost(self)

    def update(
        self,
        *,
        epoch: int | None = None,
        step: int | None = None,
        image_idx: int | None = None,
        image_size: int | None = None,
        args: Args | None = None,
    ) -> Use:
        """Add arguments to this use alone."""
        self._own = {**self._own, **named_args(epoch, step, image_idx, image_size, args)}
        return self

    def __call__(self, function: F, /) -> F:
        """Decorate ``function``."""
        return wrap(function, self)

    @overload
    def iter(self, iterable: Iterable[T], *, include_iter: bool = True, include_block: bool = True) -> Iterable[T]: ...

    @overload
    def iter(
        self, iterable: AsyncIterable[T], *, include_iter: bool = True, include_block: bool = True
    ) -> AsyncIterable[T]: ...

    def iter(self, iterable: Any, *, include_iter: bool = True, include_block: bool = True) -> Any:
        """Iterate as `Node.iter` does, with the arguments of this use."""
        if _span_events.is_compiling():
            return iterable
        wait = self._derive("iter") if include_iter else None
        return Loop(iterable, wait, self._derive("block") if include_block else None)

    def _derive(self, name: str) -> Use:
        return Use(self._node.derive(name), args=self._own, enable=self._enable)
