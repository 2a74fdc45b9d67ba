"""What the environment says about tracing: ``PIPESIGHT_*``, or else DFTracer's ``DFTRACER_*``."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from pipesight._logger import own_logger

__all__ = ["INTERVALS", "MOST", "Settings"]

logger = own_logger(__name__)

INTERVALS = (0.001, 86_400.0)
"""The shortest and the longest interval, in seconds: a millisecond, a day."""

MOST = 2**63 - 1
"""The largest number of bytes, or of parts."""

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True, slots=True)
class Settings:
    """How to trace; ``None`` where the environment says nothing."""

    enable: bool | None = None
    """Whether to trace at all."""
    log_file: Path | None = None
    """The trace file."""
    data_dir: str | None = None
    """Accepted for DFTracer's programs, and not used."""
    inc_metadata: bool = True
    """Whether to write the arguments of events."""
    trace_compression: bool = True
    """Whether to compress the file."""
    track_labels: bool = True
    """Whether to write the lines by which viewers label and sort tracks."""
    log_level: str | None = None
    """The level of the logger ``pipesight.trace``."""
    interval: float = 0.5
    """Seconds until an event is on disk, at most."""
    max_bytes: int | None = None
    """The size of a file, at most."""
    max_parts: int | None = None
    """How many files to keep."""

    @staticmethod
    def from_environment() -> Settings:
        """Read the environment; warn about wrong values, and use the defaults instead."""
        enable, file = _switch("ENABLE"), _read("LOG_FILE")
        if not file and enable and "PIPESIGHT_ENABLE" in os.environ:  # programs for DFTracer name a file themselves
            file = "trace"
        if file and file.endswith(os.sep):  # a folder, there or not
            file += "trace"
        return Settings(
            enable=enable,
            log_file=Path(file) if file else None,
            data_dir=_read("DATA_DIR"),
            inc_metadata=_switch("INC_METADATA") is not False,
            trace_compression=_switch("TRACE_COMPRESSION") is not False,
            track_labels=_labels(enable),
            log_level=_read("LOG_LEVEL"),
            interval=_seconds("TRACE_INTERVAL", 0.5),
            max_bytes=_limit("TRACE_MAX_BYTES"),
            max_parts=_limit("TRACE_MAX_PARTS"),
        )

    def set_log_level(self) -> None:
        """Give the logger ``pipesight.trace`` the level that was asked for, if any."""
        level = (self.log_level or "").strip().upper()
        if level in logging.getLevelNamesMapping():
            logging.getLogger("pipesight.trace").setLevel(level)
        elif level:
            variable, value = _find("LOG_LEVEL")
            logger.warning("%s must be DEBUG, INFO, WARN or ERROR, but is %r; ignored", variable, value)


def _find(name: str) -> tuple[str, str | None]:
    """Return the variable that sets ``name``, ours before DFTracer's, and its value."""
    for variable in (f"PIPESIGHT_{name}", f"DFTRACER_{name}"):
        if variable in os.environ:
            return variable, os.environ[variable]
    return f"PIPESIGHT_{name}", None


def _read(name: str) -> str | None:
    return _find(name)[1]


def _switch(name: str) -> bool | None:
    variable, value = _find(name)
    if value is None:
        return None
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        logger.warning("%s must be 0 or 1, but is %r; ignored", variable, value)
        return None
    return word in _TRUE


def _labels(enable: bool | None) -> bool:
    """Tell whether to label tracks; not in traces for DFTracer's programs, which may count lines, unless asked to."""
    asked = _switch("TRACK_LABELS")
    return not (enable and _find("ENABLE")[0] == "DFTRACER_ENABLE") if asked is None else asked


def _seconds(name: str, default: float) -> float:
    variable, value = _find(name)
    if not value:
        return default
    number = _number(value)
    least, most = INTERVALS
    if not least <= number <= most:
        logger.warning("%s must be %g to %g seconds, but is %r; using %s", variable, least, most, value, default)
        return default
    return number


def _limit(name: str) -> int | None:
    """Return a whole number, or ``None`` for 0, which means no limit."""
    variable, value = _find(name)
    number = _number(value) if value else 0.0
    if not (0 <= number <= MOST and number.is_integer()):
        logger.warning("%s must be a whole number, or 0 for no limit, but is %r; using 0", variable, value)
        return None
    return min(int(number), MOST) or None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
