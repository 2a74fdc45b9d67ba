"""Mini-batches and steps: which tasks belong together, and how long each step took.

A *mini-batch* is one call of a pipeline and its backward; its window runs from its first forward to its last backward.
A *step* holds the mini-batches that carry its number; its period runs from its first forward to that of the next::

    |<------------------- period of step 3 ------------------->|<-- period of step 4
    |<---- window ---->| optimizer |  loading data  |          |<---- window ---->|

Ranks that have the same partitions are *replicas* of each other, and are kept apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, OPTIMIZER, WEIGHT
from pipesight.runs.reading.event_tables import Column, Spans, Table, Tasks

__all__ = [
    "EVALUATION",
    "INCOMPLETE",
    "TRAINING",
    "MiniBatchTable",
    "StepTable",
    "find_minibatches",
    "find_steps",
    "forward_only",
    "replicas_of",
]

_NEVER = np.iinfo(np.int64).max

TRAINING, EVALUATION, INCOMPLETE = range(3)
"""Kinds of mini-batches. An evaluation has no backward; tasks are missing from what is incomplete, or there twice."""


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatchTable(Table):
    """One mini-batch per row; its tasks are rows ``first`` to ``first + count`` of the table it was found in."""

    replica: Column
    """The replica that ran it."""
    step: Column
    """The step it belongs to."""
    kind: Column
    """`TRAINING`, `EVALUATION` or `INCOMPLETE`."""
    partitions: Column
    """How many."""
    chunks: Column
    """How many micro-batches."""
    begin: Column
    """Of its first forward, in microseconds."""
    end: Column
    """Of its last task."""
    first: Column
    """The row of its first task."""
    count: Column
    """How many tasks it has."""
    samples: Column
    """How many it has; -1 if that was not recorded."""

    def task_rows(self) -> Column:
        """Return the rows of the tasks of all mini-batches, one mini-batch after the other."""
        return _ranges(self.first, self.count)


@dataclass(frozen=True, slots=True, eq=False)
class StepTable(Table):
    """One step of a replica per row; its mini-batches are rows ``first`` to ``first + count`` of their table.

    ``follows`` says whether the period ends where the next step begins; if not, the next was not recorded.
    """

    replica: Column
    step: Column
    begin: Column
    end: Column
    complete: Column
    follows: Column
    first: Column
    count: Column

    def members(self) -> Column:
        """Return the rows of the mini-batches of all steps, one step after the other."""
        return _ranges(self.first, self.count)


def _ranges(first: Column, count: Column) -> Column:
    """Return the numbers from ``first`` to ``first + count`` of each row, one row after the other."""
    start = np.cumsum(count) - count
    rows: Column = np.repeat(first - start, count) + np.arange(int(count.sum()))
    return rows


def replicas_of(tasks: Tasks, known: Mapping[int, int] | None = None) -> dict[int, int]:
    """Return the replica that each rank belongs to.

    Unless it is known of all of them, the first rank with some partitions is taken to be of replica 0, and so on.
    """
    if not len(tasks):
        return {}
    if tasks.rank.min() == tasks.rank.max():
        return {int(tasks.rank[0]): 0}
    if known:
        there = np.unique(tasks.rank).tolist()
        if all(rank in known for rank in there):
            return {rank: known[rank] for rank in there}
    width = int(tasks.partition.max(initial=0)) + 1
    pairs = np.unique(tasks.rank.astype(np.int64) * width + tasks.partition)
    ranks, begins = np.unique(pairs // width, return_index=True)
    seen: dict[bytes, int] = {}
    replicas = {}
    for rank, own in zip(ranks.tolist(), np.split(pairs % width, begins[1:]), strict=True):
        key = own.tobytes()
        replicas[rank] = seen.get(key, 0)
        seen[key] = replicas[rank] + 1
    return replicas


def find_minibatches(
    tasks: Tasks, *, partitions: Collection[int] = (), replicas: Mapping[int, int] | None = None
) -> tuple[MiniBatchTable, Tasks]:
    """Find the mini-batches, in order of time, and return the tasks so that those of one lie together, by their begin.

    Pipelines have as many ``partitions`` as are known here; others are incomplete. ``replicas`` are by default as
    `replicas_of` finds them.
    """
    if not len(tasks):
        return MiniBatchTable.empty(), tasks
    replica = _replica_column(tasks, replicas_of(tasks) if replicas is None else replicas)
    key = _dense(replica, tasks.step, _ordinal(tasks))
    follows = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & (tasks.begin[1:] >= tasks.begin[:-1]))
    if not follows.all():
        order = np.lexsort((tasks.begin, key))
        tasks, key, replica = tasks.where(order), key[order], replica[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    count = np.diff(first, append=len(key))
    row = np.repeat(np.arange(len(first)), count)
    found = MiniBatchTable(
        replica=replica[first],
        step=tasks.step[first],
        kind=_kinds(tasks, row, first, count, replica[first], partitions),
        partitions=np.maximum.reduceat(tasks.partition, first) + 1,
        chunks=np.maximum.reduceat(tasks.microbatch, first) + 1,
        begin=tasks.begin[first],
        end=np.maximum.reduceat(tasks.end, first),
        first=first,
        count=count,
        samples=np.maximum.reduceat(tasks.samples, first),
    )
    return found.where(np.lexsort((found.begin, found.replica))), tasks


def forward_only(minibatches: MiniBatchTable, tasks: Tasks) -> dict[int, Column]:
    """Return the numbers of the mini-batches without a backward, by rank; nothing if there is no other.

    These are evaluations, whole or not, and a last mini-batch that was cut short. ``tasks`` is the table that
    ``minibatches`` were found in.
    """
    own = tasks.where(minibatches.task_rows())
    row = np.repeat(np.arange(len(minibatches)), minibatches.count)
    trained = _any(row, (own.phase == BACKWARD) | (own.phase == WEIGHT), len(minibatches))
    if not trained.any():
        return {}
    apart = own.where(~trained[row] & (own.minibatch >= 0))
    return {int(rank): np.unique(apart.minibatch[apart.rank == rank]) for rank in np.unique(apart.rank)}


def find_steps(
    minibatches: MiniBatchTable, spans: Spans, replicas: Mapping[int, int]
) -> tuple[StepTable, MiniBatchTable]:
    """Group mini-batches into steps, and return them so that those of one step lie together.

    Evaluations belong to no step, unless there is nothing else. A step of which a mini-batch is incomplete is not
    complete either.
    """
    training = minibatches.kind != EVALUATION
    if not (minibatches.kind == TRAINING).any():
        training = np.ones(len(minibatches), bool)
    own = minibatches.where(training)
    key = _dense(own.replica, own.step)
    order = np.lexsort((own.begin, key))
    own, key = own.where(order), key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1)) if len(own) else np.zeros(0, np.int64)
    begin, last = own.begin[first], np.maximum.reduceat(own.end, first) if len(own) else own.end
    steps = StepTable(
        replica=own.replica[first],
        step=own.step[first],
        begin=begin,
        end=last,
        complete=~np.logical_or.reduceat(own.kind == INCOMPLETE, first) if len(own) else own.kind == 0,
        follows=np.zeros(len(first), bool),
        first=first,
        count=np.diff(first, append=len(own)),
    )
    steps = steps.where(np.lexsort((begin, steps.replica)))
    return _with_periods(steps, minibatches, spans, replicas), own


def _with_periods(
    steps: StepTable, minibatches: MiniBatchTable, spans: Spans, replicas: Mapping[int, int]
) -> StepTable:
    """Let each step end where the next begins or, if that was not recorded, with the last thing it did."""
    follows = np.zeros(len(steps), bool)
    follows[:-1] = (np.diff(steps.replica) == 0) & (np.diff(steps.step) == 1)
    end = steps.end.copy()
    end[:-1][follows[:-1]] = steps.begin[1:][follows[:-1]]
    end = np.maximum(end, steps.begin)
    known = np.unique(spans.rank)
    of_span = np.array([replicas.get(rank, -1) for rank in known.tolist()], np.int64)[
        np.searchsorted(known, spans.rank)
    ]
    last = np.append(np.diff(steps.replica) != 0, True)[: len(steps)]
    for replica in np.unique(steps.replica[~follows]).tolist():
        own = np.flatnonzero((steps.replica == replica) & ~follows)
        begins = np.append(np.sort(minibatches.begin[minibatches.replica == replica]), _NEVER)
        next_begin = begins[np.searchsorted(begins, end[own])]
        mine = spans.where(of_span == replica)
        # What lies between recorded steps, after the optimizer, belongs to steps that were not recorded.
        steps_of_optimizer = mine.where(mine.kind == OPTIMIZER)
        ends = np.append(np.sort(steps_of_optimizer.end), _NEVER)
        optimized = ends[np.searchsorted(ends, end[own], side="right")]
        final = np.where(last[own], mine.end[mine.begin < next_begin[-1]].max(initial=0), optimized)
        end[own] = np.where(final == _NEVER, end[own], np.clip(final, end[own], next_begin))
    columns = {**steps.columns(), "end": end, "follows": follows}
    return StepTable(**columns)


def _replica_column(tasks: Tasks, replicas: Mapping[int, int]) -> Column:
    ranks = np.array(sorted(replicas))
    numbers = np.array([replicas[rank] for rank in ranks.tolist()], np.int64)
    return numbers[np.searchsorted(ranks, tasks.rank)]


def _dense(*keys: Column) -> Column:
    """Number the rows by their keys, from 0, in the order of the keys."""
    number = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        low, high = (int(key.min()), int(key.max())) if len(key) else (0, 0)
        number = number * (high - low + 1) + (key.astype(np.int64) - low)
        if len(number) and int(number.max()) > 2**40:
            number = np.unique(number, return_inverse=True)[1].astype(np.int64)
    return number


def _ordinal(tasks: Tasks) -> Column:
    """Number the mini-batches of each step from 0, and return that of each task: ranks count differently.

    A trace without such numbers has the same task twice instead.
    """
    place = _dense(tasks.rank, tasks.step)
    if (tasks.minibatch < 0).any():
        place = _dense(place, tasks.phase, tasks.partition, tasks.microbatch)
        order = np.lexsort((tasks.begin, place))
        starts = np.flatnonzero(np.diff(place[order], prepend=-1))
        ordinal = np.empty(len(place), np.int64)
        ordinal[order] = np.arange(len(place)) - np.repeat(starts, np.diff(starts, append=len(place)))
        return ordinal
    both = _dense(place, tasks.minibatch)
    if (np.diff(both) < 0).any():
        pairs, inverse = np.unique(both, return_inverse=True)
    else:  # sorted already
        new = np.diff(both, prepend=-1) != 0
        pairs, inverse = both[new], np.cumsum(new) - 1
    place_of_pair = np.empty(len(pairs), np.int64)
    place_of_pair[inverse] = place
    starts = np.flatnonzero(np.diff(place_of_pair, prepend=-1))
    ordinals = np.arange(len(pairs)) - np.repeat(starts, np.diff(starts, append=len(pairs)))
    return ordinals[inverse]


def _kinds(tasks: Tasks, row: Column, first: Column, count: Column, replica: Column, known: Collection[int]) -> Column:
    n = np.maximum.reduceat(tasks.partition, first) + 1
    m = np.maximum.reduceat(tasks.microbatch, first) + 1
    forwards = np.bincount(row[tasks.phase == FORWARD], minlength=len(first))
    backwards = np.bincount(row[(tasks.phase == BACKWARD) | (tasks.phase == WEIGHT)], minlength=len(first))
    whole = forwards == n * m
    # Each partition runs a phase for every micro-batch, or not at all; recomputation is free to stop earlier.
    width = int(n.max())
    lane = (row * 4 + tasks.phase) * width + tasks.partition
    whole &= ~_any(row, (np.bincount(lane)[lane] != m[row]) & (tasks.phase % 2 == 0), len(first))
    task = lane * int(m.max()) + tasks.microbatch
    task.sort()
    twice = task[1:][np.diff(task) == 0] // (4 * width * int(m.max()))
    whole[twice] = False
    if known:
        whole &= np.isin(n, list(known))
    # A killed process leaves a last mini-batch that may look like a smaller one. It does if no other is like it.
    odd = _unique(n, m, count) & np.where(backwards == 0, _unique(n, m), backwards != forwards)
    end = np.maximum.reduceat(tasks.end, first)
    for number in np.unique(replica):
        own = np.flatnonzero(replica == number)
        last = own[np.argmax(end[own])]
        if odd[last] and count[last] < np.median(count[own]):
            whole[last] = False
    return np.where(~whole, INCOMPLETE, np.where(backwards > 0, TRAINING, EVALUATION))


def _any(row: Column, mask: Column, length: int) -> Column:
    return np.bincount(row[mask], minlength=length) > 0


def _unique(*keys: Column) -> Column:
    """Return which rows have keys that no other row has."""
    _, which, counts = np.unique(np.stack(keys), axis=1, return_inverse=True, return_counts=True)
    alone: Column = counts[which.ravel()] == 1
    return alone
