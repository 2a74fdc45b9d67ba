"""Nodes: the events of a trace, and every way to record them.

A node holds no start time: spans do (`_span_events`), so one node can be open many times at once.

A node that does not record has another class, `SilentNode`, so that its ``with`` block costs almost nothing. Python
looks up both ends of a ``with`` block when it starts, so a switch in the middle of a block only affects the next one.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from pipesight.trace import _span_events, _started_spans
from pipesight.trace._args import named_args
from pipesight.trace._loop import Loop
from pipesight.trace._recording_switch import ALWAYS, changing, roots
from pipesight.trace._span_events import BACKLOG_MASK, EVENTS, METADATA, NO_ARGS, Args, end_innermost, next_id, now
from pipesight.trace._wrap import wrap
from pipesight.trace.use import Use

__all__ = ["Node", "SilentNode"]

F = TypeVar("F")
T = TypeVar("T")

_get, _set, _ident = _span_events.current, _span_events.resume, threading.get_ident
_add = EVENTS.extend


class Node:
    """An event of a trace, such as ``ai.compute.forward``, or a category of events, such as ``ai.compute``.

    Record it as a decorator, as a context manager, around a loop, or by hand::

        @ai.compute.forward
        def forward(model, x): ...

        with ai.compute.forward(args={"layer": 3}): ...

        for batch in ai.dataloader.fetch.iter(dataloader): ...

        ai.compute.forward.start()
        ai.compute.forward.stop()

    Unless a trace is being written (`pipesight.trace.start`), nothing is recorded, at next to no cost. ``disable()``
    and ``enable()`` switch an event and all below it; ``update(epoch=3)`` adds arguments to all of them;
    ``derive("name")`` returns an event of your own below this one.

    Attributes:
        name: What the event is called in the trace.
        category: The category it belongs to in the trace.
        args: Arguments that every span of it carries.
        enabled: Whether it is recorded while a trace is being written.
        recording: Whether a span that starts now is recorded.
    """

    phase = "X"
    recording = True  # unlike a SilentNode

    def __init__(self, name: str, category: str, parent: Node | None = None, args: Args = NO_ARGS) -> None:
        self.name = name
        self.category = category
        self.args: Args = args if parent is None else {**parent.args, **args}
        self.enabled: bool = parent is None or parent.enabled
        self._parent = parent
        self._added: dict[str, Node] = {}
        self._derived: dict[str, Node] = {}
        if parent is None:
            with changing():
                roots.add(self)
        self._choose_class()

    def __repr__(self) -> str:
        return f"<{self.category}.{self.name}{'' if self.enabled else ', disabled'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self._path(),)

    def _path(self) -> tuple[tuple[str, str], ...]:
        if self._parent is None:
            return ((self.name, self.category),)
        names = {id(child): name for name, child in (*self._parent._added.items(), *self._parent._derived.items())}
        return (*self._parent._path(), (names[id(self)], self.category))

    # A block of code.

    def __enter__(self) -> Node:
        up = _get()
        if up[5] != _ident():
            up = _span_events.adopt(up)
        _set((self, next_id(), up, now(), up[4] + 1, up[5]))
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        moment = now()
        span = _get()
        node, number, up, start, level, thread = span
        if node is not self:
            end_innermost(self)  # if it began in this context
            return
        _set(up)
        _add((self, number, up[1], start, moment, level, thread, self.args))
        if not number & BACKLOG_MASK:
            _span_events.check_backlog()

    # A function, or one use with arguments of its own.

    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(
        self,
        /,
        *,
        args: Args | None = None,
        epoch: int | None = None,
        step: int | None = None,
        image_idx: int | None = None,
        image_size: int | None = None,
        enable: bool | None = None,
    ) -> Use: ...

    def __call__(self, function: Any = None, /, **options: Any) -> Any:
        """Decorate ``function``; or, given keywords, return a decorator and context manager with these arguments.

        Args:
            function: Function, method or generator to record each call of.
            **options: ``args``, a dict of arguments for the span; ``epoch``, ``step``, ``image_idx``, ``image_size``,
                arguments by name; ``enable``, to record this use whatever the event's own switch says.
        """
        if function is not None:
            if options:
                raise TypeError(f"pass arguments or a function, not both: @{self!r}({', '.join(options)}=...)")
            return wrap(function, self)
        return Use(self, **options)

    # A loop.

    @overload
    def iter(
        self,
        iterable: Iterable[T],
        *,
        include_iter: bool = True,
        include_block: bool = True,
        iter_name: str | None = None,
        block_name: str | None = None,
    ) -> Iterable[T]: ...

    @overload
    def iter(
        self,
        iterable: AsyncIterable[T],
        *,
        include_iter: bool = True,
        include_block: bool = True,
        iter_name: str | None = None,
        block_name: str | None = None,
    ) -> AsyncIterable[T]: ...

    def iter(
        self,
        iterable: Any,
        *,
        include_iter: bool = True,
        include_block: bool = True,
        iter_name: str | None = None,
        block_name: str | None = None,
    ) -> Any:
        """Iterate, recording each wait for an item as ``NAME.iter`` and each run of the loop's body as ``NAME.block``.

        Args:
            iterable: What to iterate over; its items come out as they are.
            include_iter: Record the waits.
            include_block: Record the bodies.
            iter_name: Another name for the waits.
            block_name: Another name for the bodies.
        """
        if _span_events.is_compiling():
            return iterable
        wait = self.named(iter_name) if iter_name else self.derive("iter")
        body = self.named(block_name) if block_name else self.derive("block")
        return Loop(iterable, wait if include_iter else None, body if include_block else None)

    # By hand.

    def start(self, *, metadata: bool = False) -> None:
        """Start a span that `stop` ends, in the same thread. With ``metadata``, write the moment instead of a span."""
        if metadata:
            self._mark("start")
        elif self.recording and not _span_events.is_compiling():
            _started_spans.start(self)

    def stop(self, *, metadata: bool = False) -> None:
        """End the span that the last `start` of this event opened, in this context or else in this thread."""
        if metadata:
            self._mark("end")
        elif not _span_events.is_compiling():
            _started_spans.stop(self)

    def _mark(self, what: Literal["start", "end"]) -> None:
        if self.recording and not _span_events.is_compiling():
            _span_events.put(METADATA, {"name": f"{self.name}.{what}", "value": _span_events.WHEN})

    # The tree.

    @property
    def cat(self) -> str:
        """The category, as DFTracer calls it."""
        return self.category

    @property
    def init(self) -> Node:
        """The event ``NAME.init``, for a constructor or other set-up."""
        return self.derive("init")

    def derive(self, name: str) -> Node:
        """Return the event ``SELF.name`` below this one, made on the first call."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a derived event must be a string that is not empty (name: {name!r})")
        if _span_events.is_compiling():
            return self  # any node will do: it is silent, and a new one would break the graph
        with changing():
            if name not in self._derived:
                self._derived[name] = Node(f"{self.name}.{name}", self.category, self)
            return self._derived[name]

    def add(self, name: str, *, category: str | None = None) -> Node:
        """Add an event below this one, as an attribute of it, and return it."""
        if hasattr(self, name):
            raise ValueError(f"{self!r} already has a {name!r}")
        child = self.named(name, category)
        setattr(self, name, child)
        return child

    def named(self, name: str, category: str | None = None) -> Node:
        """Return the event below this one that is called just ``name``, made on the first call."""
        with changing():
            if name not in self._added:
                self._added[name] = Node(name, category or self.category, self)
            return self._added[name]

    def __getattr__(self, name: str) -> Node:
        # Called only for missing attributes; the return type is for editors, which know no events.
        names = ", ".join(self.__dict__.get("_added", ())) or "none"
        raise AttributeError(
            f"{self.__dict__.get('name', 'a node')!r} has no event {name!r} (its events: {names}); "
            f"for one of your own, use derive({name!r})"
        )

    def subtree(self) -> Iterator[Node]:
        """Yield this event and all below it."""
        yield self
        for child in [*self._added.values(), *self._derived.values()]:
            yield from child.subtree()

    def update(
        self,
        *,
        epoch: int | None = None,
        step: int | None = None,
        image_idx: int | None = None,
        image_size: int | None = None,
        args: Args | None = None,
    ) -> Node:
        """Add arguments to the spans of this event and all below it that end from now on."""
        new = named_args(epoch, step, image_idx, image_size, args)
        if new:
            with changing():
                for node in self.subtree():
                    node.args = {**node.args, **new}
        return self

    def enable(self) -> None:
        """Record this event and all below it."""
        self._switch(True)

    def disable(self) -> None:
        """Stop recording this event and all below it."""
        self._switch(False)

    def _switch(self, enabled: bool) -> None:
        with changing():
            for node in self.subtree():
                node.enabled = enabled
                node._choose_class()

    def _choose_class(self) -> None:
        """Become a `SilentNode` or a `Node`, as the switches say."""
        self.__class__ = Node if self.enabled and ALWAYS.recording else SilentNode


class SilentNode(Node):  # noqa: D101
    __doc__ = Node.__doc__  # most users meet the tree before a trace is started, and call help() on it

    recording = False

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        return None


def _find(path: tuple[tuple[str, str], ...]) -> Node:
    """Return the node of this process that a pickled one stands for."""
    with changing():
        (name, category), *rest = path
        node: Node | None = next((root for root in roots if (root.name, root.category) == (name, category)), None)
        node = node or Node(name, category)
        for name, _ in rest:
            node = node._added.get(name) or node.derive(name)
    return node
