"""Spans that `Node.start` opens and `Node.stop` closes, perhaps in another context of the same thread."""

from __future__ import annotations

import os
import threading
from typing import Any

from pipesight.trace._span_events import Span, begin, current, end, resume

__all__ = ["start", "stop"]

_started: dict[int, Span] = {}  # by their IDs
os.register_at_fork(after_in_child=_started.clear)


class _Started:
    """Takes the place of the node in such a span, so that no ``with`` block of the node closes it."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


def start(node: Any) -> None:
    """Open a span that `stop` closes."""
    if _started:
        _leave_stopped()
    span = begin(_Started(node))
    _started[span[1]] = span


def stop(node: Any) -> None:
    """Close the innermost started span of ``node`` in this context, or else the last one that this thread started."""
    span: Span | None = current()
    while span is not None and not (type(span[0]) is _Started and span[0].node is node and span[1] in _started):
        span = span[2]
    if span is None:
        here = threading.get_ident()
        mine = (other for other in reversed(list(_started.values())) if other[5] == here)
        span = next((other for other in mine if other[0].node is node), None)
    if span is not None and _started.pop(span[1], None) is not None:
        end(span, node.args, node)
    _leave_stopped()


def _leave_stopped() -> None:
    """Leave the innermost spans of this context that were stopped in another."""
    span = current()
    while type(span[0]) is _Started and span[1] not in _started:
        span = span[2]
        resume(span)
