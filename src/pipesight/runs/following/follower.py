"""Follow a run while it grows: whether it has begun or ended, and its last steps.

Each look reads what was added to the files since the last one, at most a few MiB. What is kept is bounded, too, however
long the run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipesight._formatting import size
from pipesight.runs.following.growing_file import GrowingFile
from pipesight.runs.following.recent_events import TraceLines
from pipesight.runs.following.recent_run import RecentRun
from pipesight.runs.format import LOGS, RANKS, RUN_FILE, STATS, TRACE, TRACE_SUFFIXES, rank_in
from pipesight.runs.reading.attempts import attempt_of_trace, choose_running
from pipesight.runs.reading.clock_shift import NO_SHIFT, ClockShift
from pipesight.runs.reading.descriptions import folder_of_runs, merged, read_description, read_ranks, runs_inside
from pipesight.runs.reading.process_liveness import KILLED, ending_of, is_gone, may_restart
from pipesight.runs.reading.run import NotARunError
from pipesight.runs.reading.safe_open import refusal, without_refused
from pipesight.runs.reading.trace_reader import find_traces

__all__ = ["Follower", "State", "check_place"]

Phase = Literal["waiting", "running", "ended"]

_CHILD = re.compile(r"-\d+-\d+\.")  # of a process that a rank started: rank-00000-4711.pfw.gz
_MOST = {TRACE: 4 * 2**20, STATS: 8 * 2**20, LOGS: 2**18}
"""Bytes on disk that one look reads, over all files of a kind."""
_LEAST = 2**16  # bytes, of each file
_LONGER = 12
"""Wait so many times longer where nothing is certain: for more of an incomplete trace without run.json, and for another
attempt of a torchrun that is still running."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run."""

    phase: Phase
    outcome: str | None = None
    """How it ended."""


def check_place(path: Path) -> None:
    """Raise `NotARunError` if there is something else than a run, so that none may still appear."""
    if path.is_dir() and (why := refusal(path / RUN_FILE, path)) is not None:
        raise NotARunError(f"{path / RUN_FILE}: {why}")
    if path.exists() and not path.is_dir() and not path.is_file():
        raise NotARunError(f"not a run: {str(path)!r} is neither a file nor a folder")
    if not path.is_dir() or (path / RUN_FILE).exists():
        if path.is_file() and not path.name.endswith(TRACE_SUFFIXES):
            raise NotARunError(
                f"not a run: {str(path)!r} is a file; give the folder of a run, or a trace such as rank-00000.pfw.gz"
            )
        return
    if inside := runs_inside(path):
        raise NotARunError(folder_of_runs(path, inside))
    names = {entry.name for entry in path.iterdir()}
    if not names or names & {TRACE, STATS, LOGS, RANKS}:
        return
    try:
        find_traces(path)
    except FileNotFoundError:
        raise NotARunError(
            f"not a run: no run.json and no trace in the folder {str(path)!r}; "
            f"record one: pipesight run --out {path / 'RUN'} train.py"
        ) from None


class Follower:
    """Follows a run directory, a folder of traces, or one trace.

    Example::

        follower = Follower(Path("RUN"))
        while follower.state.phase != "ended":
            if follower.look():
                print(follower.run.steps())
            time.sleep(1)

    Args:
        path: The run. It need not exist yet.
        steps: How many of the last steps to keep.
        quiet: Seconds without new data after which a run whose process is gone has ended.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, path: Path, *, steps: int = 100, quiet: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self._steps, self._quiet, self._clock = steps, quiet, clock
        self._reset()

    def _reset(self) -> None:
        self.state = State("waiting")
        self.run = RecentRun(self.path, steps=self._steps)
        """What has been read so far; each look changes it."""
        self._files: dict[Path, GrowingFile] = {}
        self._traces: list[Path] = []  # of the attempt that is read
        self._closed: dict[Path, bool] = {}  # whether each has ended
        self._told: dict[str, Any] = {}  # by run.json
        self._ranks: dict[int, dict[str, Any]] = {}  # what others say
        self._grew_at = -math.inf

    def look(self) -> bool:
        """Read what is new; return whether there is anything new to show."""
        if self.state.phase == "ended":
            return False
        before = self.state
        told = self._read_facts()
        self._choose_attempt()
        events = list(self._new(TRACE))
        if events:
            self._read_ranks()
            self.run.add_events([self._lines(path, lines) for path, lines in events])
        said = False
        for path, lines in self._new(STATS):
            self.run.add_statistics(_rank(path), lines)
            said = True
        for path, lines in self._new(LOGS):
            self.run.add_log_lines(_rank(path), lines)
            said = True
        self.state = self._judge()
        more = self.run.settle(everything=self.state.phase == "ended")
        return told or said or more or self.state != before

    def close(self) -> None:
        """Close the run."""
        self.run.close()

    # Reading.

    def _read_facts(self) -> bool:
        """Read run.json, if it has changed."""
        try:
            facts = read_description(self.path, self.run.remark)
            changed_at = (self.path / RUN_FILE).stat().st_mtime
        except (OSError, ValueError):  # pipesight replaces it atomically, others may not
            return False
        known = self._told
        if facts == known:
            return False
        if known and any(facts.get(name) != known.get(name) for name in ("started", "pid", "host")):
            self._begin_anew()  # another run, in the same place, or another attempt
        self._told = facts
        self.run.description = merged(facts, self._ranks)
        self._note_growth(changed_at)
        return True

    def _begin_anew(self) -> None:
        self.close()
        self._reset()

    def _choose_attempt(self) -> None:
        """Choose the attempt to read; if it has changed, drop what was read."""
        told, found = self._told, self._find_traces()
        if told.get("restart") or any(attempt_of_trace(path) for path in found):
            self._read_ranks()
        chosen = choose_running(self.path, [(_rank(path), path) for path in found], told, self._ranks)
        if self._files and chosen.number != self.run.attempt.number:
            self._begin_anew()
            self._told, self.run.description = told, merged(told, {})
        self.run.attempt = chosen
        self._traces = [path for path in found if attempt_of_trace(path) == chosen.of_rank(_rank(path))]

    def _read_ranks(self) -> None:
        """Read the descriptions of the other ranks: their clocks, hosts and restarts."""
        ranks = read_ranks(self.path)
        if ranks != self._ranks:
            self._ranks = ranks
            self.run.description = merged(self._told, ranks)

    def _note_growth(self, changed_at: float) -> None:
        """Remember when a file last changed, by our clock."""
        age = max(0.0, time.time() - changed_at)
        self._grew_at = max(self._grew_at, self._clock() - age)

    def _new(self, kind: str) -> Iterator[tuple[Path, list[bytes]]]:
        """Yield the files that have new lines, with those lines."""
        paths = self._paths(kind)
        most = max(_LEAST, _MOST[kind] // max(len(paths), 1))
        for path in paths:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = GrowingFile(path)
            left_out = file.left_out
            try:
                lines = file.new_lines(most=most)
                changed_at = path.stat().st_mtime
            except OSError:  # gone, or unreadable
                continue
            if file.left_out > left_out:
                self.run.remark(path, f"skipped {size(file.left_out)} to keep up; `pipesight report` reads all of it")
            if lines:
                self._note_growth(changed_at)
                yield path, lines

    def _lines(self, path: Path, lines: list[bytes]) -> TraceLines:
        shift = ClockShift.of(self._ranks.get(_rank(path), {})) or NO_SHIFT
        self._closed[path] = lines[-1].strip() == b"]"
        return TraceLines(lines, _rank(path), own=_CHILD.search(path.name) is None, shift=shift)

    def _find_traces(self) -> list[Path]:
        try:
            return find_traces(self.path, refuse=self.run.remark)
        except OSError:
            return []

    def _paths(self, kind: str) -> list[Path]:
        """Return the files of the chosen attempt."""
        attempt = self.run.attempt
        try:
            if kind == STATS:
                found = [path for path in (self.path / kind).glob("*.jsonl") if attempt.has_statistics(path)]
            elif kind == LOGS:
                found = [path for path in (self.path / kind).glob("*.log") if attempt.has_log(path, _rank(path))]
            else:
                return self._traces
        except OSError:
            return []
        return without_refused(sorted(found), self.path, self.run.remark)

    # State.

    def _judge(self) -> State:
        facts = self.run.description
        quiet = self._clock() - self._grew_at
        if facts and facts.get("outcome") != "ok" and quiet < self._quiet * _LONGER and may_restart(facts):
            return State("running")
        if facts.get("ended"):
            ranks = facts.get("world_size") or 1
            if ranks == 1 or self._are_closed(ranks) or quiet >= self._quiet:
                return State("ended", self._ending() or str(facts.get("outcome") or "ok"))
            return State("running")  # other ranks may still be writing
        if facts:
            gone = quiet >= self._quiet and is_gone(facts.get("pid"), facts)
            return State("ended", self._ending() or KILLED) if gone else State("running")
        if not self._closed:
            return State("waiting")
        # Without run.json, more may always come.
        patience = self._quiet if self._are_closed(1) else self._quiet * _LONGER
        return State("ended", "ok") if quiet >= patience else State("running")

    def _ending(self) -> str | None:
        """Return which rank ended the run, if the others say so; they may write that after the last event."""
        self._read_ranks()
        return ending_of(self.run.description)

    def _are_closed(self, least: int) -> bool:
        """Return whether at least so many traces exist, and all have ended."""
        return len(self._closed) >= least and all(self._closed.values())


def _rank(path: Path) -> int:
    return rank_in(path.name) or 0
