"""Events of a block of code in memory, for tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from pipesight.trace._encode import NAMING, Encoder
from pipesight.trace._tracer import tracer

__all__ = ["capture_events"]


@contextlib.contextmanager
def capture_events() -> Iterator[list[dict[str, Any]]]:
    """Record the events of a ``with`` block; the list is filled when the block ends.

    Each event is a dict with the keys of a line in a trace file: ``name``, ``cat``, ``ph``, ``ts``, ``dur``, ``args``.

    Example::

        with capture_events() as events:
            train_step()
        assert [event["name"] for event in events] == ["forward", "backward", "step"]
    """
    events: list[dict[str, Any]] = []
    capture = _Capture()
    tracer.add(capture)
    try:
        yield events
    finally:
        tracer.remove(capture)
        lines = b"".join(capture.texts).splitlines()
        events += [json.loads(line) for line in lines if not line.startswith(NAMING)]


class _Capture:
    """Keeps the lines in memory."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def put(self, text: bytes, events: int) -> None:
        self.texts.append(text)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def log_lost(self) -> None:
        """Do nothing: memory loses no events."""

    def after_fork(self, encoder: Encoder) -> None:
        """Capture nothing in a forked process."""
