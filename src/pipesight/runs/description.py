"""`run.json`: what a rank writes about its run, from the start."""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import time
from typing import Any

from pipesight._logger import own_logger
from pipesight._os_facts import current_folder, processors
from pipesight._version import __version__
from pipesight._whole_file import whole_file
from pipesight.runs.directory import RunDirectory
from pipesight.runs.format import FORMAT, FORMAT_VERSION

__all__ = ["Description", "outcome_of"]

logger = own_logger(__name__)


class Description:
    """The facts about a run. The file is replaced atomically, so readers see either the old one or the new one."""

    def __init__(
        self, directory: RunDirectory, *, clock: dict[str, Any], observed: dict[str, Any], versions: dict[str, Any]
    ) -> None:
        self._file = directory.description
        self._complained = False
        self.written = 0.0
        """When it was last written, by the monotonic clock."""
        self._facts: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "pipesight": __version__,
            "python": sys.version.partition(" ")[0],
            **versions,
            "command": list(sys.orig_argv),
            "cwd": current_folder(),
            "host": socket.gethostname(),
            "processors": processors(),
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
            "program": {"loaders": [], "optimizers": [], "models": []},
            "observed": observed,
            "left_out": {"steps": 0, "events": 0, "log_lines": 0},
        }

    def end(self, outcome: str) -> None:
        """Set when and how the run ended."""
        self._facts.update(ended=_now(), outcome=outcome)

    def update(self, **facts: Any) -> None:
        """Add facts, and write the file; if that fails, training goes on."""
        self._facts.update(facts)
        self.written = time.monotonic()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self._file) as file:
                file.write(f"{json.dumps(self._facts, indent=1)}\n".encode())
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("%s cannot be written (%s); training goes on", self._file, error)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="microseconds")


def outcome_of(error: BaseException | None) -> str:
    """Return how a run ended, in one line."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "ok"
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code}"
    notes: list[str] = getattr(error, "__notes__", [])
    first, *others = [*str(error).strip().split("\n"), *notes]
    place = next((line for line in others if line.startswith("in partition ")), "")  # added by pipelines
    text = f"{first[:500]} {place}".strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
