"""`run.json`: what is known about a run, on disk from its first moment on."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import sys
import time
from typing import Any

from pipesight._logger import own_logger
from pipesight._version import __version__
from pipesight.runs.directory import RunDirectory
from pipesight.runs.format import FORMAT, FORMAT_VERSION

__all__ = ["Description", "outcome_of"]

logger = own_logger(__name__)


class Description:
    """The facts about a run. A file is replaced at one stroke, so readers see all of it or what was there before.

    Args:
        directory: Where it belongs.
        clock: What there is to say of it.
        observed: What is recorded.
        versions: Of torch and CUDA.
    """

    def __init__(
        self, directory: RunDirectory, *, clock: dict[str, Any], observed: dict[str, Any], versions: dict[str, Any]
    ) -> None:
        self._file = directory.description
        self._complained = False
        self.written = 0.0
        """When it was written last, by the monotonic clock."""
        self._facts: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "pipesight": __version__,
            "python": sys.version.partition(" ")[0],
            **versions,
            "command": list(sys.orig_argv),
            "cwd": _folder(),
            "host": socket.gethostname(),
            "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "rank": directory.rank,
            "world_size": directory.ranks,
            "restart": directory.restart,
            "launch": directory.launch,
            "started": _now(),
            "ended": None,
            "outcome": None,
            "clock": clock,
            "pipelines": [],
            "observed": observed,
            "left_out": {"steps": 0, "events": 0, "log_lines": 0},
        }

    def end(self, outcome: str) -> None:
        """Note that the run is over, and how it went."""
        self._facts.update(ended=_now(), outcome=outcome)

    def update(self, **facts: Any) -> None:
        """Note what was learned, and write it; training goes on if that fails."""
        self._facts.update(facts)
        self.written = time.monotonic()
        partial = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(json.dumps(self._facts, indent=1) + "\n")
                partial.replace(self._file)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("%s cannot be written (%s); training goes on", self._file, error)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="microseconds")


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "?"


def outcome_of(error: BaseException | None) -> str:
    """Say how a run ended, in one line."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "ok"
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code}"
    notes: list[str] = getattr(error, "__notes__", [])
    first, *others = [*str(error).split("\n"), *notes]
    place = next((line for line in others if line.startswith("in partition ")), "")  # as pipelines add it
    text = f"{first[:500]} {place}".strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
