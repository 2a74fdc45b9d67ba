"""The hot path: where a span begins and ends.

The innermost open span of a piece of code is in a context variable, so threads, asyncio tasks and greenlets each have
their own, and code that runs in a copied context (``asyncio.to_thread``, the workers of a pipeline) is nested in the
span it came from. A span is a tuple, not an object: it costs half as much, and Python's collector sees nothing that
lasts.

    enter:  (node, id, up, start, level, thread) --> context variable
    exit:   node, id, parent's id, start, end, level, thread, args --> EVENTS, a flat list

`EVENTS` is appended to by any thread, in single C calls that Python's lock makes atomic, and emptied by the writer.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = [
    "CROWD",
    "EVENTS",
    "FIELDS",
    "METADATA",
    "NO_ARGS",
    "ROOT_ID",
    "WHEN",
    "Args",
    "Mark",
    "Place",
    "Span",
    "adopt",
    "begin",
    "begin_process",
    "begin_silently",
    "call_for_help",
    "current",
    "end",
    "end_innermost",
    "innermost",
    "is_compiling",
    "lose",
    "next_id",
    "now",
    "on_crowd",
    "on_flush",
    "on_lost",
    "on_pass",
    "on_thread",
    "past",
    "put",
    "remove",
    "resume",
    "start",
    "stop",
    "thread_ids",
]

Args: TypeAlias = Mapping[str, Any]
"""What a span carries. Never changed once it is there: whoever updates makes a new one."""

Place: TypeAlias = tuple[Args, int, int, int, int, int, str | None, int, int]
"""In the place of `Args`, for what is done in a pipeline: what the node carries; the way that arrows go from here,
1, -1 or 0 for none; step, mini-batch, partition, micro-batch and layer; of tasks, how many partitions there are, and
the number of a pipeline that goes over several processes, 0 of others."""

Span: TypeAlias = tuple[Any, int, Any, int, int, int]

NO_ARGS: Args = {}
ROOT_ID = 6
"""The event ``start``, which the file begins with and in which all others are nested."""

EVENTS: list[Any] = []
FIELDS = 8
"""How many entries of `EVENTS` make one event."""

CROWD = (1 << 14) - 1
"""A mask: when it leaves nothing of a span's id, it is time to look how many events are waiting."""

now = time.perf_counter_ns
_SILENT = -1
_first = 0  # the first span of this process; those before it are of the one that it was forked from
_ROOT: Span = (None, ROOT_ID, None, 0, 1, -1)
_open: contextvars.ContextVar[Span] = contextvars.ContextVar("pipesight_open_span", default=_ROOT)
current, resume = _open.get, _open.set
next_id = itertools.count(ROOT_ID + 1).__next__
_ident = threading.get_ident

thread_ids: dict[int, tuple[int, str]] = {}
"""The operating system's number and the name of each thread, by Python's number."""

on_crowd: list[Callable[[], None]] = []
"""Called now and then by whoever records, so that a writer that cannot follow gets help."""

on_flush: list[Callable[[bool], None]] = []
"""Called before events are written; with true, before they are written for the last time."""

on_lost: list[Callable[[int], None]] = []
"""Called with the number of events that were dropped before they reached `EVENTS`."""

on_pass: list[Callable[[bool], None]] = []
"""Called by whoever calls a pipeline: with true when its workers begin, with false when they are through."""

on_thread: list[Callable[[], None]] = []
"""Called when a thread records its first span."""


def _never() -> bool:
    return False


is_compiling: Callable[[], bool] = _never
"""Whether ``torch.compile`` is looking at this code rather than running it; torch's own function, once it is there."""


def lose(count: int) -> None:
    """Count events that will be missing from the trace."""
    for add in on_lost:
        add(count)


def adopt(up: Span) -> Span:
    """Return ``up`` as the parent of spans of this thread, which has not had any, or comes with another's context."""
    ident = _ident()
    thread_ids[ident] = (threading.get_native_id(), threading.current_thread().name)
    for announce in on_thread:
        announce()
    return (*up[:5], ident)


def begin_process() -> None:
    """Forget the spans and threads of the process that this one was forked from."""
    global _first
    _first = next_id()
    thread_ids.clear()
    _started.clear()
    _open.set(_ROOT)


def call_for_help() -> None:
    """Let whoever records give the writer a hand, if it cannot follow."""
    for help_writer in on_crowd:
        help_writer()


def begin(node: Any) -> Span:
    """Open a span of ``node`` inside the current one, and return it."""
    up = _open.get()
    if up[5] != _ident():
        up = adopt(up)
    span = (node, next_id(), up, now(), up[4] + 1, up[5])
    _open.set(span)
    return span


def begin_silently(node: Any) -> Span:
    """Open a span that will not be recorded; what is nested in it belongs to the one around it."""
    up = _open.get()
    span = (node, up[1], up, _SILENT, up[4], up[5])
    _open.set(span)
    return span


def end(span: Span, args: Args | Place, node: Any = None) -> None:
    """Close a span, from wherever among the open ones it is, and record it, as one of ``node`` if that is given."""
    moment = now()
    at = span
    if _open.get() is span:
        _open.set(span[2])
    else:
        at = remove(span)
    if span[3] != _SILENT and span[1] >= _first:
        owner = span[0] if node is None else node
        EVENTS.extend((owner, span[1], at[2][1], span[3], moment, at[4], span[5], args))
        if not span[1] & CROWD:
            call_for_help()


def end_innermost(node: Any) -> None:
    """Close the innermost open span of ``node``, if there is one in this context."""
    span: Span | None = _open.get()
    while span is not None and span[0] is not node:
        span = span[2]
    if span is not None:
        end(span, node.args)


def innermost(wanted: Callable[[Any], bool]) -> Span | None:
    """Return the innermost open span of this context whose node is ``wanted``."""
    span: Span | None = _open.get()
    while span is not None and not wanted(span[0]):
        span = span[2]
    return span


def remove(span: Span) -> Span:
    """Take a span out of the open ones, from wherever among them it is, and return it as it is there.

    Spans that began in it and are still open belong to the one around it from now on::

        |--- a ---|                 b began in a, but ends after it: its parent is a's parent
            |--- b ---|
    """
    above = []
    at: Span | None = _open.get()
    # It may not be the same object: it was moved, or another thread has adopted it.
    while at is not None and not (at[1] == span[1] and at[3] == span[3] and at[0] is span[0]):
        above.append(at)
        at = at[2]
    if at is None:
        return span  # opened in another context, which has it still
    up = at[2]
    for node, number, _, moment, _, thread in reversed(above):
        silent = moment == _SILENT
        up = (node, up[1] if silent else number, up, moment, up[4] if silent else up[4] + 1, thread)
    _open.set(up)
    return at


class _ByHand:
    """In the place of the node of a span that `start` opened, so that no block ends it as its own."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


_started: dict[int, Span] = {}


def start(node: Any) -> None:
    """Open a span that `stop` closes."""
    if _started:
        _leave_stopped()
    span = begin(_ByHand(node))
    _started[span[1]] = span


def stop(node: Any) -> None:
    """Close the innermost started span of ``node`` in this context, or else the last one that this thread started."""
    span: Span | None = _open.get()
    while span is not None and not (type(span[0]) is _ByHand and span[0].node is node and span[1] in _started):
        span = span[2]
    if span is None:
        here = _ident()
        mine = (other for other in reversed(list(_started.values())) if other[5] == here)
        span = next((other for other in mine if other[0].node is node), None)
    if span is not None and _started.pop(span[1], None) is not None:
        end(span, node.args, node)
    _leave_stopped()


def _leave_stopped() -> None:
    """Close the innermost spans of this context that were stopped in another."""
    span = _open.get()
    while type(span[0]) is _ByHand and span[1] not in _started:
        span = span[2]
        _open.set(span)


WHEN = object()
"""As an argument of a mark: its own time, in microseconds."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event without a duration: metadata (M), a counter (C), an instant (i), an end of an arrow (s, f)."""

    phase: Literal["M", "C", "i", "s", "f"]
    name: str
    category: str
    key: int = 0
    """Joins the two ends of an arrow."""


METADATA = Mark("M", "CM", "dftracer")
"""A fact about the run: arguments ``name`` and ``value``."""


def put(mark: Mark, args: Args, moment: int | None = None) -> None:
    """Record a mark, now or at another ``moment``, in the current span and thread."""
    up = _open.get()
    if up[5] != _ident():
        up = adopt(up)
    at = now() if moment is None else moment
    EVENTS.extend((mark, up[1], up[1], at, at, up[4], up[5], args))
    if not len(EVENTS) & CROWD:
        call_for_help()


def past(node: Any, start: int, stop: int, args: Args, *, number: int | None = None, thread: int | None = None) -> None:
    """Record a span that is over: inside the current one, or, given a ``thread``, by itself on that track."""
    up = _ROOT if thread is not None else _open.get()
    if thread is None and up[5] != _ident():
        up = adopt(up)
    EVENTS.extend((node, number or next_id(), up[1], start, stop, up[4] + 1, up[5] if thread is None else thread, args))
    if not len(EVENTS) & CROWD:
        call_for_help()
