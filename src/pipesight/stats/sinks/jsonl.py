"""Statistics as JSON lines with all digits: ``{run}/stats/rank-00000.jsonl``, one object for each value.

An object has ``iteration``, ``layer``, ``tensor``, ``statistic`` and ``value``. JSON has no NaN and no infinities: such
a value is ``null``, and ``nonfinite`` says which: ``"nan"``, ``"inf"`` or ``"-inf"``, so that ``value`` stays a column
of numbers. ``nans`` and ``infs`` say how many elements the value leaves out, where there are any, and ``ranks`` which
ranks have them, where several were merged. Such a line also has an ``order``: the place of the tensor among those with
NaN or Inf of its iteration and rank, in the order of computation, and, from a pipeline, the ``partition``,
``microbatch`` and ``phase`` in which the first of them came up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from math import isfinite
from pathlib import Path

from pipesight.stats.log_settings import process_rank
from pipesight.stats.sinks.line_file import LineFile
from pipesight.stats.sinks.record import Record

__all__ = ["JsonlSink"]


class JsonlSink:
    """Writes ``{run}/stats/rank-00000.jsonl``."""

    forgives = (OSError,)

    def __init__(self, run: str | os.PathLike[str], *, rank: int | None = None, overwrite: bool = True) -> None:
        rank = process_rank() if rank is None else rank
        self.path = Path(run).absolute() / "stats" / f"rank-{rank:05d}.jsonl"
        self._lines = LineFile(self.path, overwrite=overwrite)

    def open(self) -> None:
        """Make the file now, not with the first value."""
        self._lines.open()

    def write(self, records: Sequence[Record]) -> None:
        """Add a line for each record."""
        self._lines.write("".join([_line(record) for record in records]).encode())

    def close(self) -> None:
        """Close the file. One without a line goes, such as that of a rank whose values another one writes."""
        self._lines.close()
        with contextlib.suppress(OSError):
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()


def _line(record: Record) -> str:
    value = float(record.value)  # NumPy's floats have another repr
    end = f"{value!r}" if isfinite(value) else f'null, "nonfinite": "{value}"'
    if record.nans:
        end += f', "nans": {int(record.nans)}'
    if record.infs:
        end += f', "infs": {int(record.infs)}'
    if record.ranks:
        end += f', "ranks": {list(record.ranks)}'
    if record.order is not None:
        end += f', "order": {record.order}'
    if record.partition is not None:
        end += f', "partition": {record.partition}'
    if record.microbatch is not None:
        end += f', "microbatch": {record.microbatch}, "phase": "{record.phase}"'
    return (
        f'{{"iteration": {record.iteration}, "layer": {quote(record.layer)}, "tensor": {quote(record.tensor)}, '
        f'"statistic": {quote(record.statistic)}, "value": {end}}}\n'
    )
