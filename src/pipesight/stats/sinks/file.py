r"""Statistics as lines of a log file, one for each value.

A line is ``2026-01-31 12:00:00,000 - INFO - fc1_activation_max \t\t\t\t iteration=000003 \t\t\t\t value=7.0000``, and
ends in ``\t\t\t\t excluded=3 nan, 1 inf`` where a value leaves elements out. A value has at least nine significant
digits, so that a float32 can be read back as it was, and at least four decimals, unless it has an exponent: below 1e-4
and from 1e16. ``float`` reads all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipesight.stats.log_settings import LogSettings, log_file, process_rank
from pipesight.stats.sinks.line_file import MOST_NAMES, Clock, LineFile
from pipesight.stats.sinks.record import Record

__all__ = ["FileSink", "format_value"]

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
        self._lines = LineFile(path, overwrite=settings.overwrite)
        self._clock, self._prefix = Clock(), prefix
        self._names: dict[tuple[str, str, str], str] = {}  # as a line has them

    def open(self) -> None:
        """Make the file now, not with the first value."""
        self._lines.open()

    def write(self, records: Sequence[Record]) -> None:
        """Add a line for each record."""
        if len(self._names) > MOST_NAMES:
            self._names.clear()
        start = f"{self._clock.now()} - INFO - "
        self._lines.write("".join([f"{start}{self._line(record)}\n" for record in records]).encode())

    def _line(self, record: Record) -> str:
        name = self._names.get(key := record[:3])
        if name is None:
            name = self._names[key] = _on_one_line(f"{self._prefix}{record.name}")
        line = f"{name}{_GAP}iteration={record.iteration:06d}{_GAP}value={format_value(record.value)}"
        return line if not (record.nans or record.infs) else f"{line}{_GAP}excluded={_excluded(record)}"

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _excluded(record: Record) -> str:
    counts = ((record.nans, "nan"), (record.infs, "inf"))
    return ", ".join(f"{int(count)} {kind}" for count, kind in counts if count)


def _on_one_line(name: str) -> str:
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def format_value(value: float) -> str:
    """Return a value as in the log file.

    Example::

        >>> [format_value(x) for x in (7.0, 1 / 3, 1e-5, 3e9, 1e25)]
        ['7.0000', '0.333333333', '1e-05', '3000000000.0000', '1e+25']
    """
    size = abs(value)
    if size < 1e16:
        fixed = f"{value:.4f}"
        if size >= 1e4 or float(fixed) == value:
            return fixed
        if size >= 1e-4:
            return f"{value:#.9g}"
    return f"{value:.9g}"
