"""The last steps of a run while it is running, as a `Run`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipesight.runs.following.recent_events import RecentEvents, TraceLines
from pipesight.runs.reading.event_codes import OPTIMIZER
from pipesight.runs.reading.event_loading import Loaded
from pipesight.runs.reading.event_tables import Spans
from pipesight.runs.reading.run import LogLine, Note, Run
from pipesight.runs.reading.stats_and_logs import is_nonfinite, parse_log

__all__ = ["RecentRun"]

MOST_STATISTICS = 50_000
MOST_NONFINITE = 1_000
MOST_LOG_LINES = 2_000


class RecentRun(Run):
    """The last steps of a run while it is running.

    It shows complete steps only: all ranks have begun the next one, or the run has ended.
    """

    followed = True

    def __init__(self, path: Path, *, steps: int) -> None:
        self._live = RecentEvents(steps=steps)
        super().__init__(path, Loaded(self._live))
        self._nonfinite: list[tuple[int, dict[str, Any]]] = []  # of the first iteration with any, and their lines
        self._statistics_read = 0
        self._recent_statistics: deque[dict[str, Any]] = deque(maxlen=MOST_STATISTICS)
        self._recent_logs: deque[tuple[int, str]] = deque(maxlen=MOST_LOG_LINES)
        self._remarks: dict[Path, str] = {}
        self._reached: int | None = None  # by all ranks, at the last look
        self._whole: list[int] = []

    # For the follower, which reads the files.

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
        """Keep the first statistics that are not finite, however old they are."""
        first = self._nonfinite[0][1].get("iteration") if self._nonfinite else entry.get("iteration")
        if entry.get("iteration") == first and (len(self._nonfinite) < MOST_NONFINITE or entry.get("order") == 0):
            self._nonfinite.append((self._statistics_read, entry))

    def add_log_lines(self, rank: int, lines: Sequence[bytes]) -> None:
        """Add new log lines of a rank."""
        self._recent_logs.extend((rank, line.decode(errors="replace")) for line in lines)

    def remark(self, path: Path, text: str) -> None:
        """Set the note on a file."""
        self._remarks[path] = text

    def settle(self, *, everything: bool) -> bool:
        """Find which steps are complete; return whether they have changed.

        A step counts as complete one look after the next one began, since threads hand in their events one by one.
        """
        before = self._whole
        bound = None if everything else self._reached or 0
        self._whole = [step for step in self._live.steps() if bound is None or step < bound]
        # A step of a program ends where the next one begins, so that one is needed too.
        self._live.show(before=bound if bound is None or self._live.has_tasks() else bound + 1)
        self._reached = min(self._live.reached().values(), default=None)
        return self._whole != before

    # For the analysis, where this run differs from one that has ended.

    @property
    def notes(self) -> list[Note]:
        """Warnings about the files."""
        return [Note(path, text) for path, text in self._remarks.items()]

    def steps(self) -> list[int]:
        """Return the complete steps that are kept, in order."""
        return list(self._whole)

    def ranks(self) -> list[int]:
        """Return the ranks that have events, in order."""
        return self._live.ranks()

    def spans(self) -> Spans:
        """Return what main threads did in the steps that are shown, up to where the next step begins.

        Spans are cut by time, not by step: a batch is fetched during one step, and has the number of the next.
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
        """Yield the first statistics that were not finite, then the last statistics; ``words`` are ignored."""
        forgotten = self._statistics_read - len(self._recent_statistics)
        yield from (entry for number, entry in self._nonfinite if number <= forgotten)
        yield from self._recent_statistics

    def measured_steps(self) -> set[int]:
        """Return those of the last statistics."""
        steps = (entry.get("iteration") for entry in self._recent_statistics if entry.get("tensor"))
        return {step for step in steps if isinstance(step, int)}

    def log_lines(self) -> Iterator[LogLine]:
        """Yield the last log lines, rank by rank."""
        for rank in sorted({rank for rank, _ in self._recent_logs}):
            yield from parse_log((line for owner, line in self._recent_logs if owner == rank), rank)
