"""What a run records, and how much of it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from pipesight.recording.run_statistics import Config
from pipesight.recording.step_sampling import StepSampling
from pipesight.runs.disk_quota import DiskQuota

__all__ = ["RecordingOptions", "level_number"]


def level_number(level: str | int) -> int:
    """Return the number of a level of `logging`; ``ValueError`` if there is no such level."""
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    number = logging.getLevelNamesMapping().get(str(level).strip().upper())
    if number is None:
        raise ValueError(f"logs must be a logging level, such as 'info' or 'debug', or None (logs: {level!r})")
    return number


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """The arguments of `observe`, checked.

    Raises:
        ValueError: The disk quota is too small or too large, or the first step is negative.
    """

    trace: bool
    stats: Config | None
    log_level: int | None
    """Log lines below it are not kept; ``None`` keeps no lines."""
    sampling: StepSampling
    max_bytes: int | None
    first_step: int
    overwrite: bool

    def __post_init__(self) -> None:
        quota = self.max_bytes
        if quota is not None and not (isinstance(quota, int | float) and quota >= DiskQuota.LEAST):
            raise ValueError(
                f"max_bytes must be at least {DiskQuota.LEAST:,}, or None for no limit (max_bytes: {quota!r})"
            )
        if quota is not None and quota > DiskQuota.MOST:
            raise ValueError(f"max_bytes must be below 2**63, or None for no limit (max_bytes: {quota!r})")
        if not isinstance(self.first_step, int) or isinstance(self.first_step, bool) or self.first_step < 0:
            raise ValueError(f"first_step must be an integer of 0 or more (first_step: {self.first_step!r})")

    def as_json(self) -> dict[str, Any]:
        """Return what ``run.json`` says under ``observed``."""
        stats = self.stats
        return {
            "trace": self.trace,
            "steps": self.sampling.as_json(),
            "every": self.sampling.every,
            "stats": os.fspath(stats) if isinstance(stats, str | os.PathLike) else None if stats is None else "a dict",
            "logs": None if self.log_level is None else logging.getLevelName(self.log_level).lower(),
            "max_bytes": self.max_bytes,
        }
