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
from pipesight.stats.sinks.line_file import MOST_NAMES, LineFile
from pipesight.stats.sinks.record import Record

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
        self._lines, self._prefix = LineFile(self.path, overwrite=overwrite), prefix
        self._names: dict[tuple[str, str, str], str] = {}  # as a line has them

    def open(self) -> None:
        """Make the file now, not with the first value."""
        self._lines.open()

    def write(self, records: Sequence[Record]) -> None:
        """Add a line for each record."""
        if len(self._names) > MOST_NAMES:
            self._names.clear()
        self._lines.write("".join([self._line(record) for record in records]).encode())

    def _line(self, record: Record) -> str:
        name = self._names.get(key := record[:3])
        if name is None:
            layer, tensor, statistic = quote(f"{self._prefix}{key[0]}"), *map(quote, key[1:])
            name = f'"layer": {layer}, "tensor": {tensor}, "statistic": {statistic}, "value": '
            self._names[key] = name
        value = float(record.value)  # NumPy's floats have another repr
        end = f"{value!r}" if isfinite(value) else f'null, "nonfinite": "{value}"'
        if record.nans or record.infs or record.ranks or record.order is not None:
            end += _excluded(record)
        return f'{{"iteration": {record.iteration}, {name}{end}}}\n'

    def close(self) -> None:
        """Close the file. One without a line goes, such as that of a rank whose values another one writes."""
        self._lines.close()
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
