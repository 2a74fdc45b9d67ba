"""For your own tests: `capture_events` gives the events that a block of code records."""

from __future__ import annotations

from pipesight.trace.capture import capture_events

__all__ = ["capture_events"]


def __dir__() -> list[str]:
    return __all__
