"""Spans of the user's own beside a pipeline: how much of the time between its passes and its steps each one covers.

Between forward and backward, and between steps, a pipeline waits for the program. What of that a span covers has its
name; where spans are nested, the innermost counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.curves import StepEdges
from pipesight.analysis.program_steps import ProgramSteps
from pipesight.analysis.program_time import nested_pieces, own_name
from pipesight.analysis.step_breakdown import Cover
from pipesight.analysis.step_grouping import EVALUATION, MiniBatchTable
from pipesight.analysis.step_times import StepTimes
from pipesight.runs.reading.event_codes import FORWARD
from pipesight.runs.reading.event_tables import Column, ProgramSpans, Spans, Tasks

__all__ = ["OwnTime", "own_times", "pipeline_edges"]


@dataclass(frozen=True, slots=True)
class OwnTime:
    """What spans of one name cover of a part of the mean step."""

    name: str
    """Of the spans."""
    part: str
    """``host_gaps``, those between forward and backward, or ``between_steps``."""
    time: float
    """In microseconds; of several ranks, the mean."""


def pipeline_edges(minibatches: MiniBatchTable, tasks: Tasks, replicas: Mapping[int, int]) -> StepEdges:
    """Return when the steps of each rank begin: with its own first task, as it may still end the step before."""
    own = minibatches.where(minibatches.kind != EVALUATION) if (minibatches.kind != EVALUATION).any() else minibatches
    tables = []
    for rank, replica in sorted(replicas.items()):
        there = tasks.where(own.where(own.replica == replica).task_rows())
        there = there.where(there.rank == rank)
        numbers, which = np.unique(there.step, return_inverse=True)
        begin = np.full(len(numbers), np.iinfo(np.int64).max)
        np.minimum.at(begin, which, there.begin)
        order = np.argsort(begin, kind="stable")
        tables.append(StepEdges(np.full(len(numbers), rank), numbers[order], begin[order]))
    return StepEdges.joined(*tables) if tables else StepEdges.empty()


def own_times(
    own: ProgramSpans,
    counted: StepTimes,
    *,
    minibatches: MiniBatchTable,
    tasks: Tasks,
    spans: Spans,
    replicas: Mapping[int, int],
) -> tuple[OwnTime, ...]:
    """Return what each span of the user's own covers in the mean step, most first.

    What main threads did else, ``spans``, comes first.
    """
    if not len(own) or not len(counted):
        return ()
    sums: dict[tuple[str, str], float] = {}
    for rank in np.unique(own.rank).tolist():
        replica = replicas.get(rank)
        steps = counted.where(np.flatnonzero(counted.replica == replica))
        if replica is None or not len(steps):
            continue
        order = np.argsort(steps.begin)
        steps = steps.where(order)
        mine = minibatches.where(minibatches.replica == replica)
        beside = spans.where(spans.rank == rank)
        known_begin = np.concatenate([mine.begin, beside.begin])
        known_end = np.concatenate([mine.end, beside.end])
        known = Cover(known_begin, known_end).within(steps.begin, steps.begin + steps.period)
        turns = _turns(mine, tasks)
        inside = Cover(*turns).within(steps.begin, steps.begin + steps.period)
        weight = 1 / (len(counted) * sum(other == replica for other in replicas.values()))
        for name, (begin, end) in _alone(own.where(own.rank == rank), steps).items():
            with_it = Cover(np.concatenate([known_begin, begin]), np.concatenate([known_end, end]))
            outside = with_it.within(steps.begin, steps.begin + steps.period) - known
            covered = _within_turns(begin, end, turns, steps)
            gaps = steps.turnaround * covered / np.maximum(inside, 1)
            for part, found in (("between_steps", outside), ("host_gaps", gaps)):
                if found.sum() > 0:
                    sums[name, part] = sums.get((name, part), 0.0) + float(found.sum()) * weight
    found_times = [OwnTime(name, part, time) for (name, part), time in sums.items()]
    return tuple(sorted(found_times, key=lambda own_time: -own_time.time))


def _turns(minibatches: MiniBatchTable, tasks: Tasks) -> tuple[Column, Column]:
    """Return the times from the last forward of each mini-batch to what comes next, where these do not overlap."""
    rows, which = minibatches.task_rows(), np.repeat(np.arange(len(minibatches)), minibatches.count)
    forward = tasks.phase[rows] == FORWARD
    last, first = np.zeros(len(minibatches), np.int64), np.full(len(minibatches), np.iinfo(np.int64).max)
    np.maximum.at(last, which[forward], tasks.end[rows[forward]])
    np.minimum.at(first, which[~forward], tasks.begin[rows[~forward]])
    apart = (first < np.iinfo(np.int64).max) & (first > last) & (last > 0)
    return last[apart], first[apart]


def _alone(own: ProgramSpans, steps: StepTimes) -> dict[str, tuple[Column, Column]]:
    """Return the times in which a span of each name is the innermost of the user's own."""
    bounds = ProgramSteps(
        rank=np.full(len(steps), own.rank[0]),
        step=steps.step,
        begin=steps.begin,
        end=steps.begin + steps.period,
        trains=np.ones(len(steps), bool),
        follows=steps.follows,
    )
    pieces = nested_pieces(own, bounds)
    found: dict[str, list[tuple[int, int]]] = {}
    inner: dict[int, list[tuple[int, int]]] = {}
    begins, ends = pieces.spans.begin.tolist(), pieces.spans.end.tolist()
    for row, outer in enumerate(pieces.outer.tolist()):
        inner.setdefault(outer, []).append((begins[row], ends[row]))
    for row, name in enumerate(pieces.spans.name.tolist()):
        at = begins[row]
        for begin, end in inner.get(row, []):
            found.setdefault(own_name(str(name)), []).append((at, begin))
            at = end
        found.setdefault(own_name(str(name)), []).append((at, ends[row]))
    return {name: (np.array(times)[:, 0], np.array(times)[:, 1]) for name, times in found.items()}


def _within_turns(begin: Column, end: Column, turns: tuple[Column, Column], steps: StepTimes) -> Column:
    """Return how much of the turns of each step some times cover."""
    covered = Cover(begin, end).within(*turns)
    place = np.searchsorted(steps.begin, turns[0], side="right") - 1
    inside = (place >= 0) & (turns[0] < (steps.begin + steps.period)[np.maximum(place, 0)])
    return np.bincount(place[inside], covered[inside], len(steps))
