"""The hot path: where a span begins and ends.

The innermost open span is in a context variable, so threads, asyncio tasks and greenlets each have their own, and code
that runs in a copied context (``asyncio.to_thread``, the workers of a pipeline) is nested in the span it came from. A
span is a tuple, not an object: that costs half as much, and leaves nothing for Python's garbage collector to visit.

    enter:  (node, id, parent, start, level, thread) --> context variable
    exit:   node, id, parent's id, start, end, level, thread, args --> EVENTS, a flat list

Any thread appends to `EVENTS`, in single C calls that the GIL makes atomic; `EncoderThread` empties it.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pipesight._logger import own_logger

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BACKLOG_MASK",
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
    "check_backlog",
    "current",
    "end",
    "end_innermost",
    "innermost",
    "is_compiling",
    "lose",
    "next_id",
    "now",
    "on_backlog",
    "on_flush",
    "on_loss",
    "on_lost",
    "on_pass",
    "on_thread",
    "past",
    "prepare_flush",
    "put",
    "remove",
    "resume",
    "thread_ids",
]

logger = own_logger(__name__)

Args: TypeAlias = Mapping[str, Any]
"""The arguments of a span. Never changed in place: an update makes a new mapping."""

Place: TypeAlias = tuple[Args, int, int, int, int, int, str | None, int, int]
"""The arguments of a span in a pipeline, instead of `Args`:

- the node's own arguments
- the direction of the arrows from here: 1, -1, or 0 for none
- step, mini-batch, partition, micro-batch and layer
- for tasks, the number of partitions, and the ID of a pipeline over several processes; else 0
"""

Span: TypeAlias = tuple[Any, int, Any, int, int, int]
"""An open span: node, ID, parent, start, level and thread."""

NO_ARGS: Args = {}
ROOT_ID = 6
"""The ID of the event ``start``, the first of a file, in which all others are nested."""

EVENTS: list[Any] = []
FIELDS = 8
"""How many entries of `EVENTS` make one event."""

BACKLOG_MASK = (1 << 14) - 1
"""A span whose ID has none of these bits calls `check_backlog`."""

now = time.perf_counter_ns
_SILENT = -1  # the start of a span that is not recorded
_first = 0  # the first ID of this process; spans with lower ones belong to the process it was forked from
_ROOT: Span = (None, ROOT_ID, None, 0, 1, -1)
_open: contextvars.ContextVar[Span] = contextvars.ContextVar("pipesight_open_span", default=_ROOT)
current, resume = _open.get, _open.set
next_id = itertools.count(ROOT_ID + 1).__next__
_ident = threading.get_ident

thread_ids: dict[int, tuple[int, str]] = {}
"""The operating system's number and the name of each thread, by Python's number."""

on_backlog: list[Callable[[], None]] = []
"""Called every few thousand events by code that records, to wait for a thread that is far behind."""

on_flush: list[Callable[[bool], None]] = []
"""Called before events are written; with true, before the last time."""

on_lost: list[Callable[[int], None]] = []
"""Called with the number of events that were dropped before they reached `EVENTS`."""

on_loss: list[Callable[[Tensor], None]] = []
"""Called with the loss of each step that a pipeline runs itself, forward and backward."""

on_pass: list[Callable[[bool], None]] = []
"""Called in the thread that calls a pipeline: with true when a pass starts, with false when it ends."""

on_thread: list[Callable[[], None]] = []
"""Called when a thread records its first span."""


def _never() -> bool:
    return False


is_compiling: Callable[[], bool] = _never
"""Whether ``torch.compile`` traces this code rather than running it; torch's own function once torch is imported."""


def lose(count: int) -> None:
    """Count events that will be missing from the trace."""
    for add in on_lost:
        add(count)


def adopt(up: Span) -> Span:
    """Return ``up`` as the parent of spans of this thread, which has none yet or runs in the context of another."""
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
    _open.set(_ROOT)


def check_backlog() -> None:
    """Wait for the thread that empties `EVENTS`, if it is far behind."""
    for limit in on_backlog:
        limit()


def prepare_flush(*, last: bool) -> None:
    """Record what is still under way elsewhere, such as on a GPU; events are about to be written."""
    for prepare in on_flush:
        try:
            prepare(last)
        except Exception:
            logger.exception("some events of a device are missing from the trace")


def begin(node: Any) -> Span:
    """Open a span of ``node`` inside the current one, and return it."""
    up = _open.get()
    if up[5] != _ident():
        up = adopt(up)
    span = (node, next_id(), up, now(), up[4] + 1, up[5])
    _open.set(span)
    return span


def begin_silently(node: Any) -> Span:
    """Open a span that is not recorded; spans in it are nested in the one around it."""
    up = _open.get()
    span = (node, up[1], up, _SILENT, up[4], up[5])
    _open.set(span)
    return span


def end(span: Span, args: Args | Place, node: Any = None) -> None:
    """Close a span, wherever it is among the open ones, and record it, as a span of ``node`` if that is given."""
    moment = now()
    at = span
    if _open.get() is span:
        _open.set(span[2])
    else:
        at = remove(span)
    if span[3] != _SILENT and span[1] >= _first:
        owner = span[0] if node is None else node
        EVENTS.extend((owner, span[1], at[2][1], span[3], moment, at[4], span[5], args))
        if not span[1] & BACKLOG_MASK:
            check_backlog()


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
    """Remove a span from the open ones, wherever it is among them, and return it as it was there.

    Spans that began in it and are still open then belong to its parent::

        |--- a ---|                 b began in a, but ends after it: its parent is a's parent
            |--- b ---|
    """
    above = []
    at: Span | None = _open.get()
    # It may be another tuple by now: its parent was removed, or another thread has adopted it.
    while at is not None and not (at[1] == span[1] and at[3] == span[3] and at[0] is span[0]):
        above.append(at)
        at = at[2]
    if at is None:
        return span  # opened in another context, where it stays open
    up = at[2]
    for node, number, _, moment, _, thread in reversed(above):
        silent = moment == _SILENT
        up = (node, up[1] if silent else number, up, moment, up[4] if silent else up[4] + 1, thread)
    _open.set(up)
    return at


WHEN = object()
"""An argument of a mark that stands for its time, in microseconds."""


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
    if not len(EVENTS) & BACKLOG_MASK:
        check_backlog()


def past(node: Any, start: int, stop: int, args: Args, *, number: int | None = None, thread: int | None = None) -> None:
    """Record a span that is over, inside the current one; with ``thread``, at the top level of that track."""
    up = _ROOT if thread is not None else _open.get()
    if thread is None and up[5] != _ident():
        up = adopt(up)
    EVENTS.extend((node, number or next_id(), up[1], start, stop, up[4] + 1, up[5] if thread is None else thread, args))
    if not len(EVENTS) & BACKLOG_MASK:
        check_backlog()
