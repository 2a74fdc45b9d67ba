"""How to write the log files: the three ``NVDLFW_INSPECT_*`` environment variables, and the rank."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipesight._launcher import launched_rank

__all__ = ["LogSettings", "log_file", "process_rank"]

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How to write the log files.

    Attributes:
        level: messages below it are not logged. Statistics always are.
        overwrite: begin log files anew; otherwise go on at their end.
        timestamp: the time that goes into the file names, or nothing.
        mistakes: what was wrong with the variables, in words. Each has its default instead.
    """

    level: int = logging.INFO
    overwrite: bool = True
    timestamp: str = ""
    mistakes: tuple[str, ...] = ()

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> LogSettings:
        """Read the variables; an unset or an empty one has its default."""
        values = os.environ if environment is None else environment
        mistakes: list[str] = []
        timestamp = _switch("NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP", values, mistakes, default=False)
        return LogSettings(
            level=_level("NVDLFW_INSPECT_LOG_LEVEL", values, mistakes),
            overwrite=_switch("NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE", values, mistakes, default=True),
            timestamp=time.strftime("%Y%m%d_%H%M%S") if timestamp else "",
            mistakes=tuple(mistakes),
        )


def _switch(variable: str, values: Mapping[str, str], mistakes: list[str], *, default: bool) -> bool:
    given = values.get(variable, "")
    word = given.strip().lower()
    if not word:
        return default
    if word not in _TRUE | _FALSE:
        mistakes.append(f"{variable} must be 0 or 1, but is {given!r}; using {int(default)}")
        return default
    return word in _TRUE


def _level(variable: str, values: Mapping[str, str], mistakes: list[str]) -> int:
    given = values.get(variable, "")
    word = given.strip().upper()
    if not word:
        return logging.INFO
    if word.isdecimal() and word.isascii():
        return int(word)
    level = logging.getLevelNamesMapping().get(word)
    if level is None:
        mistakes.append(
            f"{variable} must be DEBUG, INFO, WARNING, ERROR, CRITICAL or a number, but is {given!r}; using INFO"
        )
        return logging.INFO
    return level


def process_rank() -> int:
    """Return the rank of this process: what torch.distributed says, or else the launcher, or else 0."""
    distributed = sys.modules.get("torch.distributed")  # it need not be imported to know that nobody initialised it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return launched_rank() or 0


def log_file(log_dir: str | os.PathLike[str], folder: str, *, rank: int, settings: LogSettings) -> Path:
    """Return the path of a log file: ``log_dir/folder/nvdlfw_inspect[_TIMESTAMP]_globalrank-R.log``."""
    time_of_start = f"_{settings.timestamp}" if settings.timestamp else ""
    return Path(log_dir).absolute() / folder / f"nvdlfw_inspect{time_of_start}_globalrank-{rank}.log"
