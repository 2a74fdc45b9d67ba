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
from pipesight.stats.sinks.line_file import LineFile, Lines
from pipesight.stats.sinks.record import Name, Record, Records

__all__ = ["JsonlSink"]


class JsonlSink:
    """Writes ``{run}/stats/rank-00000.jsonl``.

    Args:
        run: The run directory.
        rank: Of this process; by default, as the environment says.
        overwrite: Whether to begin anew.
        prefix: Goes before each layer.
    """

    forgives = (OSError,)

    def __init__(
        self, run: str | os.PathLike[str], *, rank: int | None = None, overwrite: bool = True, prefix: str = ""
    ) -> None:
        rank = process_rank() if rank is None else rank
        self.path = Path(run).absolute() / "stats" / f"rank-{rank:05d}.jsonl"
        self._file, self._prefix = LineFile(self.path, overwrite=overwrite), prefix
        self._lines = Lines(self._line)

    def open(self) -> None:
        """Make the file now, not with the first value."""
        self._file.open()

    def write(self, records: Sequence[Record]) -> None:
        """Add a line for each record."""
        text = ""
        for batch in Records.of(records):
            values: list[float | str] = [
                value if isfinite(value) else f'null, "nonfinite": "{value}"' for value in batch.values
            ]
            for place, extra in batch.extras.items():
                values[place] = f"{values[place]}{_excluded(Record('', '', '', 0, 0.0, *extra))}"
            text += self._lines.filled(batch.names, values, str(batch.iteration))
        self._file.write(text.encode())

    def _line(self, name: Name) -> str:
        layer, tensor, statistic = quote(f"{self._prefix}{name[0]}"), *map(quote, name[1:])
        shown = f'"layer": {layer}, "tensor": {tensor}, "statistic": {statistic}'.replace("%", "%%")
        return f'{{"iteration": \0, {shown}, "value": %s}}\n'

    def close(self) -> None:
        """Close the file. One without a line goes, such as that of a rank whose values another one writes."""
        self._file.close()
        with contextlib.suppress(OSError):
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()


def _excluded(record: Record) -> str:
    """Return what a line says of NaN and Inf in the tensor."""
    end = ""
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
    return end
