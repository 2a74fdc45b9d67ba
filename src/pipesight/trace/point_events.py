"""Events without a duration: counters and instants."""

from __future__ import annotations

from typing import Any

from pipesight.trace import _span_events
from pipesight.trace._args import plain_args
from pipesight.trace._recording_switch import is_recording
from pipesight.trace._span_events import Mark, put

__all__ = ["counter", "instant", "memory_counter", "memory_instant"]

MEMORY = "memory"
"""The category of what is recorded of memory. The program's own counters and instants have others."""


def counter(name: str, /, **values: float) -> None:
    """Record values that change over time; viewers draw a curve for each.

    Example::

        counter("memory", allocated=torch.cuda.memory_allocated())
    """
    if is_recording() and not _span_events.is_compiling():
        put(Mark("C", name, "counter"), plain_args(values))


def instant(name: str, /, **args: Any) -> None:
    """Record that something happened now; viewers draw a mark.

    Example::

        instant("lr dropped", lr=0.01)
    """
    if is_recording() and not _span_events.is_compiling():
        put(Mark("i", name, "instant"), plain_args(args))


def memory_counter(name: str, values: dict[str, int]) -> None:
    """Record bytes in memory; viewers stack them."""
    if is_recording() and not _span_events.is_compiling():
        put(Mark("C", name, MEMORY), values)


def memory_instant(name: str, values: dict[str, Any]) -> None:
    """Record what memory is used for in more detail."""
    if is_recording() and not _span_events.is_compiling():
        put(Mark("i", name, MEMORY), values)
