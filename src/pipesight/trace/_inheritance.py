"""What a traced process hands on to the processes it starts: environment variables that make them trace too.

Each child writes a file of its own beside the parent's. On the same host it also uses the parent's clock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from pipesight._logger import own_logger
from pipesight.trace.environment_settings import Settings

__all__ = ["handed_on", "inherited", "inherited_clock", "read_again", "set_environment"]

logger = own_logger(__name__)


def handed_on(given: Path, settings: Settings, clock_offset: int) -> dict[str, str]:
    """Return the variables that make child processes trace as this one does."""
    values: dict[str, object] = {
        "ENABLE": 1,
        "LOG_FILE": given,
        "INC_METADATA": int(settings.inc_metadata),
        "TRACE_COMPRESSION": int(settings.trace_compression),
        "TRACK_LABELS": int(settings.track_labels),
        "TRACE_INTERVAL": settings.interval,
        "TRACE_MAX_BYTES": settings.max_bytes or 0,
        "TRACE_MAX_PARTS": settings.max_parts or 0,
        "PARENT": os.getpid(),
        "CLOCK": f"{clock_offset}@{os.uname().nodename}",
    }
    return {f"PIPESIGHT_{name}": str(value) for name, value in values.items()}


def set_environment(values: dict[str, str] | dict[str, str | None]) -> dict[str, str | None]:
    """Set environment variables, or remove those that are ``None``; return what they were before."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIPESIGHT_")}


_at_start = _variables()


def read_again() -> None:
    """Use the environment of now instead of that of the start of this process."""
    global _at_start
    _at_start = _variables()


def inherited(name: str) -> str | None:
    """Return what the process that started this one handed on; ``None`` if it was not traced."""
    return _at_start.get(f"PIPESIGHT_{name}") if "PIPESIGHT_PARENT" in _at_start else None


def inherited_clock() -> int | None:
    """Return the clock offset of the process that started this one, if it runs on the same host."""
    given = inherited("CLOCK") or ""
    clock, _, host = given.partition("@")
    if host != os.uname().nodename:
        return None
    try:
        offset = int(clock)
        time.gmtime((offset + time.perf_counter_ns()) // 10**9)
    except (ValueError, OverflowError, OSError):
        logger.warning("PIPESIGHT_CLOCK must be nanoseconds and a host, but is %r; using the current clock", given)
        return None
    return offset
