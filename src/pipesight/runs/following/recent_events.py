"""The events of the last steps of a run; the oldest are dropped as new ones come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.runs.reading.clock_shift import ClockShift
from pipesight.runs.reading.duckdb_events import DuckEvents, Source
from pipesight.runs.reading.event_queries import Frame

__all__ = ["RecentEvents", "TraceLines"]

_KEPT = tuple(f'"ph":{space}"{phase}"'.encode() for phase in "XCi" for space in ("", " "))
"""What lines of spans, counters and instants contain."""
_SLACK = 1.25
"""Old steps are dropped once there are so many times more than the limit, so that it is not done at each look."""


@dataclass(frozen=True, slots=True)
class TraceLines:
    """New lines of a trace."""

    lines: Sequence[bytes]
    rank: int
    own: bool
    """Whether they are of the rank's own process, not of one that it started."""
    shift: ClockShift


class RecentEvents(DuckEvents):
    """A table of events of bounded size.

    It keeps ``most`` rows, but at least those of two steps.
    """

    def __init__(self, *, steps: int, most: int = 500_000) -> None:
        super().__init__()
        self.count = 0
        """Events that were read, including those dropped since."""
        self._steps, self._most = steps, most
        self._before: int | None = None

    @property
    def frame(self) -> Frame:
        """The events of complete steps, and those without a step."""
        import narwhals

        frame = self.whole_frame
        return frame if self._before is None else frame.filter(narwhals.col("step") < self._before)

    @property
    def whole_frame(self) -> Frame:
        """The same, with the steps that are not complete yet."""
        return super().frame

    def show(self, *, before: int | None) -> None:
        """Show only steps before this one."""
        self._before = before

    def add(self, batches: Sequence[TraceLines]) -> None:
        """Add the spans in new lines."""
        sources = []
        for number, batch in enumerate(batches):
            path = self.folder / f"new-{number}.pfw"
            path.write_bytes(b"\n".join(line for line in batch.lines if any(mark in line for mark in _KEPT)))
            sources.append(Source(path, number, batch.rank, batch.own, batch.shift, packed=False))
        before = self._size()
        try:
            self.read(sources)
            self.settle()
        finally:
            for source in sources:
                source.path.unlink()
        self.count += self._size() - before
        self._drop_old()

    def _size(self) -> int:
        ((size,),) = self._rows("SELECT count(*) FROM events")
        return size

    def has_tasks(self) -> bool:
        """Return whether anything is a task of a pipeline."""
        return bool(self._rows("SELECT 1 FROM events WHERE phase >= 0 LIMIT 1"))

    def _in_steps(self) -> str:
        """Return the condition for what makes steps: tasks or, in a program without any, what its main threads do."""
        return "step >= 0 AND " + ("phase >= 0" if self.has_tasks() else "kind >= 0")

    def reached(self) -> dict[int, int]:
        """Return the last step of each rank that has any."""
        rows = self._rows(f"SELECT rank, max(step) FROM events WHERE {self._in_steps()} GROUP BY rank")
        return {rank: step for rank, step in rows}  # noqa: C416

    def steps(self) -> list[int]:
        """Return the steps, complete or not."""
        rows = self._rows(f"SELECT DISTINCT step FROM events WHERE {self._in_steps()} ORDER BY step")
        return [step for (step,) in rows]

    def hidden(self) -> dict[int, tuple[int, int]]:
        """Return the first hidden step of each rank, and when it begins."""
        if self._before is None:
            return {}
        rows = self._rows(
            'SELECT rank, arg_min(step, "begin"), min("begin") FROM events '
            f"WHERE phase >= 0 AND step >= {self._before:d} GROUP BY rank"
        )
        return {rank: (step, begin) for rank, step, begin in rows}

    def ranks(self) -> list[int]:
        """Return the ranks, in order."""
        return [rank for (rank,) in self._rows("SELECT DISTINCT rank FROM events ORDER BY rank")]

    def _drop_old(self) -> None:
        rows = self._rows("SELECT step, count(*), min(begin) FROM events GROUP BY step ORDER BY step")
        sizes = [(step, size, begin) for step, size, begin in rows if step >= 0]
        total = sum(size for _, size, _ in rows)
        if len(sizes) <= self._steps * _SLACK and total <= self._most * _SLACK:
            return
        first, begin = 0, 0
        if sizes:
            after = np.cumsum([size for _, size, _ in sizes[::-1]])  # rows of the last step, the last two, and so on
            kept = min(max(2, int(np.searchsorted(after, self._most, side="right"))), self._steps, len(sizes))
            first, _, begin = sizes[-kept]
        self._database.execute(
            "CREATE OR REPLACE TEMP TABLE events AS (SELECT * FROM events WHERE step >= $first) UNION ALL "
            '(SELECT * FROM events WHERE step < 0 AND "end" > $begin ORDER BY begin DESC LIMIT $most)',
            {"first": first, "begin": begin, "most": self._most},
        )

    def _rows(self, query: str) -> list[tuple[int, ...]]:
        return self._database.execute(query).fetchall()
