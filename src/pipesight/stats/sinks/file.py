r"""Statistics as lines of a log file, one for each value.

A line is ``2026-01-31 12:00:00,000 - INFO - fc1_activation_max \t\t\t\t iteration=000003 \t\t\t\t value=7.0000``, and
ends in ``\t\t\t\t excluded=3 nan, 1 inf`` where a value leaves elements out. A value has at least nine significant
digits, so that a float32 can be read back as it was, and at least four decimals, unless it has an exponent: below 1e-4
and from 1e16. ``float`` reads all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipesight.stats.log_settings import LogSettings, log_file, process_rank
from pipesight.stats.sinks.line_file import Clock, LineFile, Lines
from pipesight.stats.sinks.record import Name, Record, Records, joined

__all__ = ["FileSink", "format_values"]

_GAP = " \t\t\t\t "


class FileSink:
    """Writes ``{log_dir}/nvdlfw_inspect_statistics_logs/nvdlfw_inspect[_TIMESTAMP]_globalrank-R.log``.

    Args:
        log_dir: The folder.
        rank: Of this process; by default, as the environment says.
        settings: Whether the file is continued, and named by time; by default, as the environment says.
        prefix: Goes before each name.
    """

    forgives = (OSError,)

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        rank: int | None = None,
        settings: LogSettings | None = None,
        prefix: str = "",
    ) -> None:
        settings = LogSettings.from_environment() if settings is None else settings
        rank = process_rank() if rank is None else rank
        path = log_file(log_dir, "nvdlfw_inspect_statistics_logs", rank=rank, settings=settings)
        self.path = path
        self._file = LineFile(path, overwrite=settings.overwrite)
        self._clock, self._prefix = Clock(), prefix
        self._lines = Lines(self._line)

    def open(self) -> None:
        """Make the file now, not with the first value."""
        self._file.open()

    def write(self, records: Sequence[Record]) -> None:
        """Add a line for each record."""
        start, text = f"{self._clock.now()} - INFO - ", ""
        for batch in Records.of(records):
            values = format_values(batch.values)
            for place, extra in batch.extras.items():
                values[place] += _excluded(extra)
            text += self._lines.filled(batch.names, values, start, f"{batch.iteration:06d}")
        self._file.write(text.encode())

    def _line(self, name: Name) -> str:
        shown = _on_one_line(f"{self._prefix}{joined(name, '_')}").replace("%", "%%")
        return f"\0{shown}{_GAP}iteration=\1{_GAP}value=%s\n"

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _excluded(extra: tuple[Any, ...]) -> str:
    counts = [f"{int(count)} {kind}" for count, kind in zip(extra, ("nan", "inf"), strict=False) if count]
    return f"{_GAP}excluded={', '.join(counts)}" if counts else ""


def _on_one_line(name: str) -> str:
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def format_values(values: Sequence[float]) -> list[str]:
    """Return values as in the log file.

    Example::

        >>> format_values([7.0, 1 / 3, 1e-5, 3e9, 1e25])
        ['7.0000', '0.333333333', '1e-05', '3000000000.0000', '1e+25']
    """
    array = np.array(values, dtype=np.float64)
    size = np.abs(array)
    with np.errstate(over="ignore", invalid="ignore"):
        fixed = (size >= 1e4) | (np.rint(array * 1e4) / 1e4 == array)  # as many decimals as say all
    kinds = np.select([(size < 1e16) & fixed, (size < 1e16) & (size >= 1e-4)], [0, 1], 2)
    formats = ("%.4f", "%#.9g", "%.9g")
    return ("\n".join([formats[kind] for kind in kinds.tolist()]) % tuple(values)).split("\n") if values else []
