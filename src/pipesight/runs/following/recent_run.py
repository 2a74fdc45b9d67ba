"""The last steps of a run that is going on: a `Run` whose files are not read to their end yet."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipesight.runs.following.recent_events import RecentEvents, TraceLines
from pipesight.runs.reading.event_tables import OPTIMIZER, Spans
from pipesight.runs.reading.loading import Loaded
from pipesight.runs.reading.run import LogLine, Note, Run
from pipesight.runs.reading.stats_and_logs import is_nonfinite, parse_log

__all__ = ["RecentRun"]

MOST_STATISTICS = 50_000
MOST_NONFINITE = 1_000
MOST_LOG_LINES = 2_000


class RecentRun(Run):
    """What is known of a run that is going on.

    It shows whole steps only: a step is whole when all ranks have gone on to the next, or the run has ended.
    """

    followed = True

    def __init__(self, path: Path, *, steps: int) -> None:
        self._live = RecentEvents(steps=steps)
        super().__init__(path, Loaded(self._live))
        self._nonfinite: list[tuple[int, dict[str, Any]]] = []  # of the first iteration with any, and their numbers
        self._statistics_read = 0
        self._recent_statistics: deque[dict[str, Any]] = deque(maxlen=MOST_STATISTICS)
        self._recent_logs: deque[tuple[int, str]] = deque(maxlen=MOST_LOG_LINES)
        self._remarks: dict[Path, str] = {}
        self._reached: int | None = None  # by all ranks, at the last look
        self._whole: list[int] = []

    # For who reads the files.

    def add_events(self, batches: Sequence[TraceLines]) -> None:
        """Add new lines of traces."""
        self._live.add(batches)
        self.events = self._live.count

    def add_statistics(self, rank: int, lines: Sequence[bytes]) -> None:
        """Add new lines of statistics of a rank."""
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                entry = {"rank": rank, **entry}
                self._recent_statistics.append(entry)
                self._statistics_read += 1
                if is_nonfinite(entry):
                    self._remember(entry)

    def _remember(self, entry: dict[str, Any]) -> None:
        """Keep the first statistics that are not finite, however long ago they were."""
        first = self._nonfinite[0][1].get("iteration") if self._nonfinite else entry.get("iteration")
        if entry.get("iteration") == first and (len(self._nonfinite) < MOST_NONFINITE or entry.get("order") == 0):
            self._nonfinite.append((self._statistics_read, entry))

    def add_log_lines(self, rank: int, lines: Sequence[bytes]) -> None:
        """Add new log lines of a rank."""
        self._recent_logs.extend((rank, line.decode(errors="replace")) for line in lines)

    def remark(self, path: Path, text: str) -> None:
        """Add a note on a file, instead of the last one on it."""
        self._remarks[path] = text

    def settle(self, *, everything: bool) -> bool:
        """Find out which steps are whole; return whether they are others than before.

        A step counts as whole one look after the next one began: threads hand in their events one after the other.
        """
        before = self._whole
        bound = None if everything else self._reached or 0
        self._whole = [step for step in self._live.steps() if bound is None or step < bound]
        self._live.show(before=bound)
        self._reached = min(self._live.reached().values(), default=None)
        return self._whole != before

    # For who asks, where it is not as of any other run.

    @property
    def notes(self) -> list[Note]:
        """What was left out, and why."""
        return [Note(path, text) for path, text in self._remarks.items()]

    def steps(self) -> list[int]:
        """Return the numbers of the whole steps that are kept, in order."""
        return list(self._whole)

    def ranks(self) -> list[int]:
        """Return the ranks that there are events of, in order."""
        return self._live.ranks()

    def spans(self) -> Spans:
        """Return what main threads did in the steps that are shown, with a last moment where the next step begins.

        A batch is fetched in the period of one step, and has the number of the next: it is time that goes by that
        counts here, not numbers.
        """
        from pipesight.runs.reading import event_queries

        spans, hidden = event_queries.spans(self._live.whole_frame, self._live.fetch), self._live.hidden()
        if not hidden:
            return spans
        never = np.iinfo(np.int64).max
        stop = np.array([hidden.get(rank, (0, never))[1] for rank in spans.rank.tolist()], np.int64)
        shown = Spans(spans.rank, spans.kind, spans.begin, np.minimum(spans.end, stop)).where(spans.begin < stop)
        last = self._whole[-1] if self._whole else None
        ends = [(rank, OPTIMIZER, begin, begin) for rank, (step, begin) in hidden.items() if step - 1 == last]
        return Spans.joined(shown, Spans(*np.array(ends, np.int64).reshape(-1, 4).T))

    def statistics(self, *, words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the last statistics, whatever words are in them, and before them the first that were not finite."""
        forgotten = self._statistics_read - len(self._recent_statistics)
        yield from (entry for number, entry in self._nonfinite if number <= forgotten)
        yield from self._recent_statistics

    def log_lines(self) -> Iterator[LogLine]:
        """Yield the last log lines, rank by rank."""
        for rank in sorted({rank for rank, _ in self._recent_logs}):
            yield from parse_log((line for owner, line in self._recent_logs if owner == rank), rank)
