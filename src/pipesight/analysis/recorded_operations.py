"""The operations of a recorded run, as a replay takes them: tasks, messages, collectives, loading and the optimizer.

A worker is a rank or, where a process has several partitions that compute at the same time, a partition. What the main
thread of such a process does counts for the worker of its first partition, before the first forward and after the last
backward of which it happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.collectives import MatchedCalls
from pipesight.analysis.partition_placement import Placement
from pipesight.analysis.process_stops import resumed
from pipesight.analysis.step_breakdown import Cover
from pipesight.analysis.step_grouping import TRAINING, MiniBatchTable
from pipesight.analysis.step_times import StepTimes
from pipesight.analysis.transfer_waits import arrivals_of
from pipesight.runs.reading.event_codes import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    WEIGHT,
)
from pipesight.runs.reading.event_tables import Column, Operations, Spans, Tasks, Transfers
from pipesight.runs.reading.operation_kinds import number_of

__all__ = ["RecordedOperations", "recorded_operations"]

MOST = 50_000
"""The most tasks that are replayed: of a longer run, steps that lie evenly between its first and its last."""

_PHASES = {
    FORWARD: "forward-compute",
    RECOMPUTE: "recompute",
    BACKWARD: "backward-compute",
    WEIGHT: "weight-gradients",
}
_SPANS = {DATA: "data-loading", OPTIMIZER: "optimizer", CHECKPOINT: "saving"}


@dataclass(frozen=True, slots=True, eq=False)
class RecordedOperations:
    """Operations, and what their workers are."""

    operations: Operations
    partition_of_worker: Mapping[int, tuple[int, int]] | None
    """Rank and partition of each worker; ``None`` where workers are ranks."""
    steps: int
    """Of how many steps these were chosen."""
    recorded: float
    """The mean step, from its first forward to that of the next."""
    origin: float
    """The time from which begins of operations count, as events have it."""
    chunks: int
    """The micro-batches of a batch."""


def recorded_operations(
    minibatches: MiniBatchTable,
    tasks: Tasks,
    transfers: Transfers,
    spans: Spans,
    calls: Sequence[MatchedCalls],
    placements: Mapping[int, Placement],
    times: StepTimes,
    stops: Mapping[int, Cover],
) -> RecordedOperations | None:
    """Return the operations of a run; ``None`` if it has no complete step, or pipelines of several sizes.

    ``calls`` are collectives, matched over ranks; ``placements`` say where partitions run, by how many there are.
    """
    minibatches = minibatches.where(minibatches.kind == TRAINING)
    there = len(np.unique(minibatches.step))
    minibatches = _some_steps(minibatches)
    if not len(minibatches) or len(np.unique(minibatches.partitions)) > 1:
        return None
    made = _Maker(minibatches, tasks, placements[int(minibatches.partitions[0])], stops)
    made.add_tasks()
    made.add_losses()
    made.add_messages(transfers)
    made.add_spans(spans)
    made.add_calls(calls)
    made.add_gaps(spans)
    recorded = float(times.period[np.isin(times.step, minibatches.step)].mean())
    operations, origin = made.operations()
    return RecordedOperations(operations, made.partition_of_worker, there, recorded, origin, made.chunks)


def _some_steps(minibatches: MiniBatchTable) -> MiniBatchTable:
    steps = np.unique(minibatches.step)
    most = max(int(MOST * len(steps) / max(int(minibatches.count.sum()), 1)), 1)
    if most >= len(steps):
        return minibatches
    chosen = steps[np.linspace(0, len(steps) - 1, most).round().astype(int)]
    return minibatches.where(np.isin(minibatches.step, chosen))


class _Maker:
    """Makes the table of operations, column by column."""

    def __init__(
        self, minibatches: MiniBatchTable, tasks: Tasks, placement: Placement, stops: Mapping[int, Cover]
    ) -> None:
        order = np.lexsort((minibatches.begin, minibatches.replica, minibatches.step))
        self._minibatches = minibatches.where(order)
        self._every, self._stops = tasks, stops
        self._waits: list[tuple[Column, Column, Column]] = []  # of ranks for messages: to come, or to be taken
        self._all_known = True  # whether all of these were recorded
        self._pieces: list[dict[str, Column]] = []
        own = self._minibatches
        self._tasks = tasks.where(own.task_rows())
        self._row = np.repeat(np.arange(len(own)), own.count)
        self._stage_of = np.array(placement.workers)
        self.chunks = int(own.chunks.max())
        self._parts = int(own.partitions[0])
        turn = np.arange(len(own)) - np.maximum.accumulate(
            np.where(_changes(own.step, own.replica), np.arange(len(own)), 0)
        )
        self._microbatch = turn[self._row] * self.chunks + self._tasks.microbatch
        code = ((self._row * 4 + self._tasks.phase) * self._parts + self._tasks.partition) * self.chunks
        code = code + self._tasks.microbatch
        self._order = np.argsort(code, kind="stable")
        self._codes = code[self._order]
        self._workers = self._find_workers()

    def _find_workers(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the replica and stage of each rank and partition that has tasks."""
        replica = self._minibatches.replica[self._row]
        stage = self._stage_of[self._tasks.partition]
        every = np.unique(np.stack([self._tasks.rank, self._tasks.partition, replica, stage], axis=1), axis=0)
        return {(rank, part): (d, s) for rank, part, d, s in every.tolist()}

    @property
    def partition_of_worker(self) -> Mapping[int, tuple[int, int]] | None:
        """Rank and partition of each worker, by its number, unless each rank is one worker."""
        stages: dict[int, set[int]] = {}
        for (rank, _), (_, stage) in self._workers.items():
            stages.setdefault(rank, set()).add(stage)
        if all(len(own) == 1 for own in stages.values()):
            return None
        return {self._number(d, s): (rank, part) for (rank, part), (d, s) in reversed(self._workers.items())}

    def _number(self, replica: int, stage: int) -> int:
        return replica * (int(self._stage_of.max()) + 1) + stage

    def _add(self, kind: str | Column, rows: Column, begin: Column, end: Column, **columns: Column) -> None:
        """Add operations of mini-batches; ``columns`` are those that are not -1."""
        count = len(rows)
        own = self._minibatches
        given = {"chunk": -1, "part": -1, "microbatch": -1, **columns}
        kinds = np.full(count, number_of(kind)) if isinstance(kind, str) else kind
        columns = {name: np.broadcast_to(np.asarray(value), count) for name, value in given.items()}
        times = {"begin": begin.astype(np.float64), "duration": np.maximum(end - begin, 0).astype(np.float64)}
        self._pieces.append({"step": own.step[rows], "replica": own.replica[rows], "kind": kinds, **times, **columns})

    def _find(self, row: Column, phase: int, partition: Column, microbatch: Column) -> Column:
        """Return the places of tasks, -1 where there is none."""
        code = ((row * 4 + phase) * self._parts + partition) * self.chunks + microbatch
        at = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        inside = (partition >= 0) & (partition < self._parts)
        found: Column = np.where(inside & (self._codes[at] == code), self._order[at], -1)
        return found

    def add_tasks(self) -> None:
        """Add what partitions computed."""
        tasks = self._tasks
        kinds = np.array([number_of(_PHASES[phase]) for phase in range(len(_PHASES))])[tasks.phase]
        self._add(
            kinds,
            self._row,
            tasks.begin,
            tasks.end,
            stage=self._stage_of[tasks.partition],
            part=tasks.partition,
            microbatch=self._microbatch,
        )

    def add_losses(self) -> None:
        """Where all forwards end before any backward, add what lies between: the loss of the whole batch."""
        forward = self._tasks.phase == FORWARD
        last = self._tasks.partition == self._parts - 1
        count = len(self._minibatches)
        ended, began = np.zeros(count, np.int64), np.full(count, np.iinfo(np.int64).max)
        np.maximum.at(ended, self._row[forward & last], self._tasks.end[forward & last])
        np.minimum.at(began, self._row[~forward], self._tasks.begin[~forward])
        every = np.zeros(count, np.int64)
        np.maximum.at(every, self._row[forward], self._tasks.end[forward])
        rows = np.flatnonzero((every <= began) & (began < np.iinfo(np.int64).max))
        self._add("loss", rows, ended[rows], began[rows], stage=self._stage_of[-1])

    def add_messages(self, transfers: Transfers) -> None:
        """Add what workers sent each other: it leaves when its task ends, and is there when the wait for it does."""
        tasks, row = self._tasks, self._row
        known = _Arrivals(arrivals_of(self._minibatches, self._every, transfers), self._parts, self.chunks)
        start = self._minibatches.begin[row]
        for phase, way, step in ((FORWARD, "forward", -1), (BACKWARD, "backward", 1)):
            target = np.flatnonzero(tasks.phase == phase)
            source = self._find(row[target], phase, tasks.partition[target] + step, tasks.microbatch[target])
            target, source = target[source >= 0], source[source >= 0]
            stages = self._stage_of[tasks.partition]
            apart = stages[source] != stages[target]
            target, source = target[apart], source[apart]
            sent = tasks.end[source]
            waited, took = known.waits(
                row[target],
                tasks.partition[target],
                tasks.microbatch[target],
                sent=sent - start[target],
                latest=tasks.begin[target] - start[target],
                earliest=None if phase == FORWARD else self._begin_of_forward(target),
            )
            waited = waited + start[target]
            arrived = np.maximum(sent, waited) + took
            waited = resumed(self._stops, tasks.rank[target], waited, arrived)
            sent = resumed(self._stops, tasks.rank[source], sent, arrived)
            self._waits.append((tasks.rank[target], waited, arrived))
            self._waits.append((tasks.rank[source], sent, arrived))
            self._all_known &= known.all_known
            for end, of, begin in (("send", source, sent), ("recv", target, waited)):
                self._add(
                    f"{way}-{end}",
                    row[of],
                    begin,
                    arrived,
                    stage=stages[of],
                    part=tasks.partition[of],
                    microbatch=self._microbatch[of],
                )

    def _begin_of_forward(self, rows: Column) -> Column:
        """Return when the forwards of the same micro-batches began, from the begin of their mini-batch."""
        tasks, row = self._tasks, self._row
        found = self._find(row[rows], FORWARD, tasks.partition[rows], tasks.microbatch[rows])
        return np.where(found >= 0, tasks.begin[found] - self._minibatches.begin[row[rows]], -1)

    # What main threads did.

    def add_spans(self, spans: Spans) -> None:
        """Add loading, the optimizer and saving, each moment once and without communication."""
        for rank, (replica, stage) in self._main_workers().items():
            mine = spans.where(spans.rank == rank)
            windows = self._windows(rank, replica)
            taken = Cover(mine.begin[mine.kind == COMMUNICATION], mine.end[mine.kind == COMMUNICATION])
            for kind, name in _SPANS.items():
                own = Cover(mine.begin[mine.kind == kind], mine.end[mine.kind == kind])
                begin, end = own.outside(taken)
                taken = taken.joined(own)
                rows = windows.after(begin) if kind == OPTIMIZER else windows.before(begin)
                there = rows >= 0
                self._add(name, rows[there], begin[there], end[there], stage=np.full(int(there.sum()), stage))

    def add_calls(self, calls: Sequence[MatchedCalls]) -> None:
        """Add calls of collectives in which every rank is of the same step."""
        workers, tasks = self._main_workers(), self._tasks
        busy = {rank: Cover(tasks.begin[tasks.rank == rank], tasks.end[tasks.rank == rank]) for rank in workers}
        for number, meeting in enumerate(calls):
            if not all(rank in workers for rank in meeting.ranks):
                continue
            rows = np.stack([self._row_of_step(workers[rank][0], meeting.step) for rank in meeting.ranks])
            there = (rows >= 0).all(axis=0)
            for rank, begin in zip(meeting.ranks, meeting.begin, strict=True):
                there &= busy[rank].within(begin, begin + 1) == 0  # what a task waits for is a part of it
            for k, rank in enumerate(meeting.ranks):
                begin, end = meeting.begin[k][there], meeting.end[k][there]
                self._add(
                    "collectives",
                    rows[k][there],
                    resumed(self._stops, np.full(len(begin), rank), begin, end),
                    end,
                    stage=np.full(int(there.sum()), workers[rank][1]),
                    chunk=np.full(int(there.sum()), number),
                )

    def add_gaps(self, spans: Spans) -> None:
        """Add the time in which a rank neither computes nor waits: its program runs, or is stopped.

        The former can be told where one thread does all of it, on the CPU, and every wait of it was recorded.
        """
        known = self.partition_of_worker is None and self._all_known and bool(self._waits)
        every = self._every
        waits = [np.concatenate(column) for column in zip(*self._waits, strict=True)] or [np.zeros(0, np.int64)] * 3
        for rank, (replica, stage) in self._main_workers().items():
            tasks, other, mine = every.where(every.rank == rank), spans.where(spans.rank == rank), waits[0] == rank
            calls, windows = other.kind == COMMUNICATION, self._windows(rank, replica)
            stops = self._stops.get(rank, Cover(tasks.begin[:0], tasks.end[:0]))
            taken = Cover(
                np.concatenate([tasks.begin, other.begin[~calls]]), np.concatenate([tasks.end, other.end[~calls]])
            )
            if known:
                waiting = Cover(
                    np.concatenate([other.begin[calls], waits[1][mine]]),
                    np.concatenate([other.end[calls], waits[2][mine]]),
                )
                first, last = (times[1:-1] for times in taken.joined(Cover(*waiting.outside(stops))).complement())
            elif self._stops:
                first, last = stops.outside(taken)
                # In a usual step, it is not stopped at all.
                first, last = (np.concatenate([times, windows.begin]) for times in (first, last))
            else:
                continue
            rows = windows.before(first)
            there = rows >= 0
            self._add("host", rows[there], first[there], last[there], stage=np.full(int(there.sum()), stage))

    def _windows(self, rank: int, replica: int) -> _Windows:
        """Return when a rank computed for each step, and the mini-batches that these are."""
        every = self._every.where(self._every.rank == rank)
        steps, which = np.unique(every.step, return_inverse=True)
        begin, end = np.full(len(steps), np.iinfo(np.int64).max), np.zeros(len(steps), np.int64)
        np.minimum.at(begin, which, every.begin)
        np.maximum.at(end, which, every.end)
        return _Windows(steps, begin, end, self._row_of_step(replica, steps))

    def _row_of_step(self, replica: int, step: Column) -> Column:
        """Return a mini-batch of each step of a replica, -1 where there is none."""
        own = np.flatnonzero(self._minibatches.replica == replica)
        at = np.minimum(np.searchsorted(self._minibatches.step[own], step), len(own) - 1)
        return np.where(self._minibatches.step[own[at]] == step, own[at], -1)

    def _main_workers(self) -> dict[int, tuple[int, int]]:
        """Return the replica and stage of the worker that each rank's main thread counts for."""
        return {rank: worker for (rank, _), worker in sorted(self._workers.items(), reverse=True)}

    def operations(self) -> tuple[Operations, float]:
        """Return what was added, by step, replica, stage and begin, and the time from which begins count."""
        columns = {name: np.concatenate([piece[name] for piece in self._pieces]) for name in self._pieces[0]}
        ranks = np.zeros(max(self._number(d, s) for d, s in self._workers.values()) + 1, np.int64)
        named = self.partition_of_worker
        for (rank, _), (d, s) in self._workers.items():
            ranks[self._number(d, s)] = rank if named is None else self._number(d, s)
        worker = columns["replica"] * (int(self._stage_of.max()) + 1) + columns["stage"]
        made = Operations(**columns, rank=ranks[worker])
        origin = float(made.begin.min())
        made.begin[:] -= origin
        return made.where(np.lexsort((made.begin, made.stage, made.replica, made.step))), origin


class _Arrivals:
    """The waits for tensors of some mini-batches."""

    def __init__(self, arrivals: Transfers, parts: int, chunks: int) -> None:
        self._arrivals, self._parts, self._chunks = arrivals, parts, chunks
        self.all_known = False
        """Whether every message that was asked for was waited for."""

    def waits(
        self,
        row: Column,
        partition: Column,
        microbatch: Column,
        *,
        sent: Column,
        latest: Column,
        earliest: Column | None,
    ) -> tuple[Column, Column]:
        """Return when tasks began to wait for messages, and how long these took once both sides were there.

        A wait is of a message if it begins between ``earliest``, if that is given, and ``latest``, when its task does.
        What was not waited for took no time.
        """
        took, waited = np.zeros(len(row), np.int64), latest - 1  # before its task, in the order of begins
        found = self._arrivals
        self.all_known = not len(row)
        if not len(found) or not len(row):
            return waited, took
        code = (row * self._parts + partition) * self._chunks + microbatch
        order = np.argsort(code)
        own = (found.minibatch * self._parts + found.partition) * self._chunks + found.microbatch
        at = order[np.minimum(np.searchsorted(code[order], own), len(code) - 1)]
        mine = (code[at] == own) & (found.begin <= latest[at])
        if earliest is not None:
            mine &= found.begin > earliest[at]
        at, begin, end = at[mine], found.begin[mine], found.end[mine]
        self.all_known = len(np.unique(at)) == len(row)
        np.minimum.at(waited, at, begin)
        np.maximum.at(took, at, np.minimum(end, latest[at]) - np.maximum(begin, sent[at]))
        return waited, took


class _Windows:
    """When a rank computed for each step, to find the one that something belongs to; -1 where that is not known."""

    def __init__(self, steps: Column, begin: Column, end: Column, rows: Column) -> None:
        self.begin = begin
        """When it began to compute for each."""
        self._end, self._rows = end, rows
        usual = float(np.median(np.diff(begin))) if len(steps) > 1 else np.inf
        # Between steps that do not follow each other there were others, which were not recorded.
        self._before = np.where(np.diff(steps, prepend=steps[:1] - 2) == 1, np.inf, usual)
        self._after = np.where(np.diff(steps, append=steps[-1:] + 2) == 1, np.inf, usual)

    def before(self, begin: Column) -> Column:
        """Return the mini-batch of the step that computed after a time, or then."""
        at = np.minimum(np.searchsorted(self._end, begin, side="right"), len(self._rows) - 1)
        near = (self._end[at] > begin) & (self.begin[at] - begin <= self._before[at])
        return np.where(near, self._rows[at], -1)

    def after(self, begin: Column) -> Column:
        """Return the mini-batch of the step that computed before a time, or then."""
        at = np.maximum(np.searchsorted(self.begin, begin, side="right") - 1, 0)
        near = (self.begin[at] <= begin) & (begin - self._end[at] <= self._after[at])
        return np.where(near, self._rows[at], -1)


def _changes(*columns: Column) -> Column:
    """Return where the value of any column is not that of the row before."""
    found = np.ones(len(columns[0]), bool)
    found[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return found
