"""The critical path of a step: the chain of tasks, transfers and gaps that ends it, from recorded times.

From the begin of the next step, back to the begin of the first task: what ran last of all that an operation waited for
came before it on the path; what lies between both is a gap. So the parts of a path follow each other without a hole,
and their times add up to the step::

    partition 0   F0 F1            . B1 B0 O L | F0     path: F0, transfer, F0, F1, B1, transfer, B1, gap, B0,
    partition 1      . F0 F1 B1 B0             |              optimizer, data loading

Where the next step was not recorded, a path ends with the last operation, mostly the optimizer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipesight.analysis.collectives import match_calls
from pipesight.analysis.described_pipelines import pipelines_of
from pipesight.analysis.operation_graph import OperationGraph, graph_of, widest_groups
from pipesight.analysis.partition_placement import place_partitions
from pipesight.analysis.process_stops import stops_in
from pipesight.analysis.recorded_operations import MOST, RecordedOperations, recorded_operations
from pipesight.analysis.step_grouping import TRAINING, find_steps
from pipesight.analysis.step_times import StepTimes
from pipesight.runs.reading.event_tables import Operations
from pipesight.runs.reading.operation_kinds import KINDS, codes_of, collectives, number_of

if TYPE_CHECKING:
    from pipesight.analysis.report import Report
    from pipesight.runs.reading.run import Run

__all__ = ["PATH_PARTS", "CriticalPath", "PathPart", "critical_paths", "following", "paths_through"]

PATH_PARTS = (
    "forward",
    "recompute",
    "backward",
    "weight",
    "loss",
    "transfer",
    "communication",
    "data loading",
    "optimizer",
    "checkpoint",
    "gap",
)
"""What the parts of a path can be."""

_TASKS = {
    "forward-compute": "forward",
    "recompute": "recompute",
    "backward-compute": "backward",
    "weight-gradients": "weight",
}
_OTHERS = {"loss": "loss", "data-loading": "data loading", "optimizer": "optimizer", "saving": "checkpoint"}
_KINDS = {
    **{number_of(name): part for name, part in (_TASKS | _OTHERS).items()},
    **dict.fromkeys(codes_of("message"), "transfer"),
    **dict.fromkeys(collectives(), "communication"),
}
_COMPUTING = [number_of(name) for name in _TASKS]
_KNOWN = [*_KINDS]


@dataclass(frozen=True, slots=True)
class PathPart:
    """A part of a path. Times are microseconds, from the begin of the path."""

    kind: str
    """One of `PATH_PARTS`."""
    rank: int
    """The rank."""
    partition: int
    """That computes, waits for the transfer, or comes after the gap; of what a main thread does, one of its rank."""
    begin: float
    """When it begins."""
    end: float
    """When it ends."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The critical path of a step."""

    step: int
    """The number of the step."""
    begin: int
    """When the first task of the step begins, as events have it."""
    follows: bool
    """Whether it ends with the first task of the next step; else with its own last operation."""
    parts: tuple[PathPart, ...]
    """By time; each begins where the one before ends."""

    def totals(self) -> dict[str, float]:
        """Return the time of each kind, in the order of `PATH_PARTS`: together, that of the path."""
        times = dict.fromkeys(PATH_PARTS, 0.0)
        for part in self.parts:
            times[part.kind] += part.end - part.begin
        return {kind: time for kind, time in times.items() if time > 0}


def critical_paths(run: Run, report: Report, steps: Sequence[int]) -> dict[int, CriticalPath]:
    """Return the critical paths of steps, by their numbers.

    There is none of incomplete steps, of those that are not among the first with `MOST` tasks, of runs with pipelines
    of several sizes, and where times contradict each other.

    ``steps`` are their numbers, most important first.
    """
    spans = run.spans()
    _, minibatches = find_steps(report.minibatches, spans, report.replicas)
    trained = minibatches.where((minibatches.kind == TRAINING) & np.isin(minibatches.step, report.steps.step))
    next_of = following(report.steps)
    room, wanted, needed = MOST, [], set[int]()
    for step in steps:
        new = {step, next_of.get(step, step)} - needed
        room -= int(trained.count[np.isin(trained.step, [*new])].sum())
        if room < 0:
            break
        wanted.append(step)
        needed |= new
    chosen = trained.where(np.isin(trained.step, [*needed]))
    if not len(chosen):
        return {}
    recorded = recorded_operations(
        chosen,
        report.tasks,
        run.transfers(),
        spans,
        match_calls(run.communications(), run.description),
        place_partitions(pipelines_of(run.description), chosen, report.tasks),
        report.steps,
        stops_in(run.points()),
    )
    return {} if recorded is None else paths_through(recorded, wanted, next_of)


def following(times: StepTimes) -> dict[int, int]:
    """Return the next step of those that another was recorded to follow."""
    steps = times.over_replicas()
    numbers = steps.step.tolist()
    return {
        one: other for one, other, known in zip(numbers, numbers[1:], steps.follows.tolist(), strict=False) if known
    }


def paths_through(
    recorded: RecordedOperations, steps: Sequence[int], next_of: Mapping[int, int]
) -> dict[int, CriticalPath]:
    """Return the critical paths of recorded steps; ``next_of`` says which follows which."""
    try:
        graph = graph_of(recorded.operations, widest_groups(recorded.operations))
    except ValueError:  # operations wait for each other in a circle: the report says so
        return {}
    walk = _Walk(recorded.operations, graph)
    there = {*recorded.operations.step.tolist()}
    after = {step: number for step, number in next_of.items() if number in there}
    return {step: walk.path(step, after.get(step), recorded) for step in steps if step in there}


class _Walk:
    """The way back through a graph, in the order of a replay but with recorded times."""

    def __init__(self, operations: Operations, graph: OperationGraph) -> None:
        self._graph = graph
        self._row = graph.row
        self._begin = operations.begin[graph.row]
        self._end = self._begin + operations.duration[graph.row]
        self._kind, self._step = operations.kind[graph.row], operations.step[graph.row]
        self._replica, self._stage = operations.replica[graph.row], operations.stage[graph.row]
        self._operations = operations
        self._met = np.full(int(graph.unit[-1]) + 1, -np.inf)
        np.maximum.at(self._met, graph.unit, self._begin)

    def path(self, step: int, after: int | None, recorded: RecordedOperations) -> CriticalPath:
        """Return the path of a step, up to the next if that was recorded."""
        start = float(self._begin[self._first_task(step)])
        first = -1 if after is None else self._first_task(after)
        follows = first >= 0 and float(self._begin[first]) > start
        at = first if follows else self._last(step)
        now = float(self._begin[at] if follows else self._end[at])
        parts: list[PathPart] = []

        def add(kind: str, operation: int, since: float) -> None:
            nonlocal now
            since = max(since, start)
            if since < now:
                parts.append(PathPart(kind, *self._place(operation, recorded), since - start, now - start))
                now = since

        while now > start:
            unit = int(self._graph.unit[at])
            add(_KINDS.get(int(self._kind[at]), "gap"), self._shown(at), float(self._met[unit]))
            sources = [*self._sources(unit), *self._of_step_before(at, step, now)]
            if not sources:
                add("gap", at, start)
                break
            before = max(sources, key=lambda source: float(self._end[source]))
            add("gap", at, float(self._end[before]))
            at = before
        return CriticalPath(step, round(recorded.origin + start), follows, tuple(_merged(parts[::-1])))

    def _first_task(self, step: int) -> int:
        """Return the task of a step that begins first."""
        tasks = np.flatnonzero((self._step == step) & np.isin(self._kind, _COMPUTING))
        return int(tasks[np.argmin(self._begin[tasks])])

    def _last(self, step: int) -> int:
        """Return the operation of a step that ends last: of several that do, the one that waited least."""
        known = np.flatnonzero((self._step == step) & np.isin(self._kind, _KNOWN))
        last = known[self._end[known] == self._end[known].max()].tolist()
        ready = [
            max((float(self._end[k]) for k in self._sources(int(self._graph.unit[own]))), default=0) for own in last
        ]
        return int(last[int(np.argmax(ready))])

    def _of_step_before(self, at: int, step: int, now: float) -> list[int]:
        """Return what the worker of an operation of the next step did last in this one: the graph ends at steps."""
        if self._step[at] == step:
            return []
        mine = (self._step == step) & np.isin(self._kind, _KNOWN) & (self._end <= now)
        own = mine & (self._replica == self._replica[at]) & (self._stage == self._stage[at])
        return np.flatnonzero(own if own.any() else mine).tolist()

    def _sources(self, unit: int) -> list[int]:
        """Return what a unit waits for; of what took no time, what that waits for."""
        first = self._graph.first_source
        found: list[int] = []
        units, seen = [unit], {unit}
        while units:
            at = units.pop()
            for source in self._graph.source[first[at] : first[at + 1]].tolist():
                own = int(self._graph.unit[source])
                if self._end[source] > self._met[own]:
                    found.append(source)
                elif own not in seen:
                    seen.add(own)
                    units.append(own)
        return found

    def _shown(self, operation: int) -> int:
        """Return what stands for an operation: for a message, its end at the receiver."""
        if KINDS[int(self._kind[operation])].role != "message":
            return operation
        unit = self._graph.unit[operation]
        own = np.arange(*np.searchsorted(self._graph.unit, [unit, unit + 1]))
        receives = [n for n in own.tolist() if KINDS[int(self._kind[n])].name.endswith("recv")]
        return receives[0] if receives else operation

    def _place(self, operation: int, recorded: RecordedOperations) -> tuple[int, int]:
        row = int(self._row[operation])
        worker, part = int(self._operations.rank[row]), int(self._operations.part[row])
        if recorded.partition_of_worker is not None:
            rank, first = recorded.partition_of_worker[worker]
            return rank, part if part >= 0 else first
        return worker, part


def _merged(parts: Sequence[PathPart]) -> list[PathPart]:
    """Put gaps that follow each other together, and leave a rank's main thread where the path was in it."""
    found: list[PathPart] = []
    for part in parts:
        partition = part.partition
        if partition < 0:
            partition = found[-1].partition if found and found[-1].rank == part.rank else -1
        if found and part.kind == "gap" == found[-1].kind and found[-1].rank == part.rank:
            part = PathPart("gap", part.rank, partition, found.pop().begin, part.end)
        else:
            part = PathPart(part.kind, part.rank, partition, part.begin, part.end)
        found.append(part)
    return found
