"""What a traced process hands on to the processes it starts: environment variables that make them trace too.

Each child writes a file of its own beside the parent's. On the same host it also uses the parent's clock.

Processes that multiprocessing's forkserver forks get the current environment, not that of the server's start::

    this process --starts--> forkserver            keeps the environment of that moment
          |                      | forks
          '--preparation--> process                gets ours with the data that multiprocessing sends to each

Unpickling that data sets the environment, before the process imports anything of the program. It consists of builtins
alone, so that it works where pipesight cannot be imported yet.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesight._logger import own_logger
from pipesight.trace.environment_settings import Settings

__all__ = ["handed_on", "inherited", "inherited_clock", "read_again", "set_environment", "update_forkserver_children"]

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


_CODE = """
import os, sys
before = {name: value for name, value in os.environ.items() if name.startswith("PIPESIGHT_")}
if before != values:
    for name in before:
        del os.environ[name]
    os.environ.update(values)
    session = sys.modules.get("pipesight.trace.trace_session")
    if session is not None:
        session.follow_environment()
"""


class _Environment:
    """Unpickling it sets the variables of pipesight to what they were where it was pickled."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_CODE, {"values": self._values})


def update_forkserver_children() -> None:
    """Send the variables of pipesight to all processes that a forkserver forks from now on."""
    spawn: Any = sys.modules.get("multiprocessing.spawn")
    if spawn is None or hasattr(spawn.get_preparation_data, "_pipesight"):
        return  # there is no server yet, or this was done before
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "pipesight": _Environment(_variables())}

    vars(get_preparation_data)["_pipesight"] = True
    spawn.get_preparation_data = get_preparation_data
