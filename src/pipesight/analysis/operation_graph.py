"""What each operation of some steps waits for, and who starts together: the graph that a replay follows.

An operation waits for the one before it in its stream and, besides::

    forward-recv -> forward-compute -> forward-send        the same micro-batch and part of the model
    backward-recv -> backward-compute -> backward-send
    params-all-gather -> first forward-compute of its chunk
    last backward-compute of its chunk -> grads-reduce-scatter
    last backward-compute -> other collectives after it -> optimizer

A message, or a call of a collective, is one *unit*: its operations start when the last of them is ready. Any other
operation is a unit of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipesight.runs.reading.event_tables import Column, Operations
from pipesight.runs.reading.operation_kinds import KINDS, codes_of, number_of

__all__ = ["OperationGraph", "graph_of", "widest_groups"]

FORWARD, BACKWARD = number_of("forward-compute"), number_of("backward-compute")
OPTIMIZER = number_of("optimizer")
BEFORE, AFTER = codes_of("before"), codes_of("after")
RECEIVES = [number_of("forward-recv"), number_of("backward-recv")]

CONTRADICTED = 0.01
"""The share of calls in which one may end before another began, for both to be the same call."""
TOLERANCE = 1000.0
"""Microseconds by which clocks may be off when it is decided who synchronises."""

_STREAMS = np.array([0 if k.role == "compute" else 1 if k.role == "after" else 2 + n for n, k in enumerate(KINDS)])


@dataclass(frozen=True, slots=True, eq=False)
class OperationGraph:
    """The operations of some steps in the order of a replay, level by level: all that a level waits for is before it.

    Operations are counted in this order; ``row`` says which one each is in the table. Units of a level follow each
    other, and so do the operations of a unit.
    """

    row: Column
    """The operation in the table."""
    unit: Column
    """The unit of each operation."""
    source: Column
    """Operations that units wait for, unit by unit: they are numbers in this order."""
    first_source: Column
    """The first of each unit in ``source``; one more at the end."""
    levels: tuple[tuple[int, int, int, int], ...]
    """Of each level, its first unit and the one after its last, and the same for operations."""
    last: Column
    """Operations that nothing waits for, step by step: they are numbers in this order."""
    first_last: Column
    """The first of each step in ``last``."""
    alone: int
    """Messages without a sender or receiver."""


def graph_of(operations: Operations, widest: Column) -> OperationGraph:
    """Return the graph of whole steps.

    ``operations`` are sorted by step, replica, stage and begin; ``widest`` is what `widest_groups` finds in the
    recording.

    Raises:
        ValueError: Operations wait for each other in a circle.
    """
    count = len(operations)
    worker = _numbered(operations.step, operations.replica, operations.stage)
    carried = _Messages(operations, worker)
    edges = [
        *_in_streams(operations, worker),
        *carried.edges(),
        *_around_collectives(operations, worker),
    ]
    source = np.concatenate([edge[0] for edge in edges])
    target = np.concatenate([edge[1] for edge in edges])
    unit, alone = _units(operations, carried, widest)
    return _levelled(operations.step, unit, source, unit[target], count, alone)


# Who waits for whom within a worker.


def _in_streams(operations: Operations, worker: Column) -> list[tuple[Column, Column]]:
    """Each operation waits for the one before it in its stream; of our own runs, receives block the compute stream."""
    blocking = np.isin(operations.kind, RECEIVES) & (operations.microbatch >= 0)
    stream = worker.astype(np.int64) * (len(KINDS) + 2) + np.where(blocking, 0, _STREAMS[operations.kind])
    order = np.argsort(stream, kind="stable")
    follows = stream[order[1:]] == stream[order[:-1]]
    return [(order[:-1][follows], order[1:][follows])]


def _around_collectives(operations: Operations, worker: Column) -> list[tuple[Column, Column]]:
    """Collectives before the first forward, after the last backward, and the optimizer after these."""
    kind, chunk = operations.kind, operations.chunk
    edges = []
    forwards, backwards = np.flatnonzero(kind == FORWARD), np.flatnonzero(kind == BACKWARD)
    for own, keys in ((chunk >= 0, [worker, chunk]), (chunk < 0, [worker])):
        before = np.flatnonzero(np.isin(kind, BEFORE) & own)
        edges.append(_joined(before, forwards, keys, first=True))
        after = np.flatnonzero(np.isin(kind, AFTER) & own)
        edges.append(_joined(after, backwards, keys, first=False)[::-1])
    after, optimizers = np.flatnonzero(np.isin(kind, AFTER)), np.flatnonzero(kind == OPTIMIZER)
    edges.append(_joined(optimizers, after, [worker], first=False)[::-1])
    edges.append(_joined(optimizers, backwards, [worker], first=False)[::-1])
    # What began before it could is recorded otherwise than it ran, as where a GPU is behind the thread that feeds it.
    return [(source[source < target], target[source < target]) for source, target in edges]


def _joined(rows: Column, others: Column, keys: list[Column], *, first: bool) -> tuple[Column, Column]:
    """Return rows, and for each the first or the last of the others that has the same keys, where there is one."""
    code = _numbered(*keys)
    there, at = np.unique(code[others] if first else code[others[::-1]], return_index=True)
    if not len(there) or not len(rows):
        return rows[:0], rows[:0]
    chosen = others[at] if first else others[::-1][at]
    place = np.minimum(np.searchsorted(there, code[rows]), len(there) - 1)
    found = there[place] == code[rows]
    return rows[found], chosen[place[found]]


# Messages: which compute operation each carries something for, and which receive belongs to which send.


class _Messages:
    """Sends and receives, and the compute operation each belongs to.

    It has the same part and micro-batch. In a trace that does not say which, the first send of a worker is of its first
    forward whose result another stage needs, and so on.
    """

    def __init__(self, operations: Operations, worker: Column) -> None:
        kind = operations.kind
        part = np.where((operations.part < 0) & (kind <= BACKWARD), operations.stage, operations.part)
        computing = (kind == FORWARD) | (kind == BACKWARD)
        stages = _stage_of_part(part[computing], operations.stage[computing])
        self._pairs: list[tuple[Column, Column, bool]] = []
        self.matched: list[tuple[Column, Column]] = []
        """Receives and their sends."""
        self.count = 0
        """Sends and receives."""
        for way, compute, step_of in (("forward", FORWARD, 1), ("backward", BACKWARD, -1)):
            keys = []
            for end, to in (("send", step_of), ("recv", -step_of)):
                rows = np.flatnonzero(kind == number_of(f"{way}-{end}"))
                own = np.flatnonzero(kind == compute)
                neighbour = part[own] + to
                inside = (neighbour >= 0) & (neighbour < len(stages))
                other = stages[np.clip(neighbour, 0, max(len(stages) - 1, 0))] if len(stages) else neighbour
                own = own[inside & (other != operations.stage[own])]
                messages, computes = _carried(operations, worker, rows, own)
                self._pairs.append((computes, messages, end == "send"))
                self.count += len(rows)
                cut = np.minimum(part[computes], part[computes] + to)  # the lower of the two parts
                keys.append((messages, operations.step[computes], operations.replica[computes], cut, computes))
            (sends, *send_key, sending), (receives, *receive_key, receiving) = keys
            both = _numbered(
                *(np.concatenate([a, b]) for a, b in zip(send_key, receive_key, strict=True)),
                operations.microbatch[np.concatenate([sending, receiving])],
            )
            there, at = np.unique(both[: len(sends)], return_index=True)
            mine = both[len(sends) :]
            if len(there) and len(mine):
                place = np.minimum(np.searchsorted(there, mine), len(there) - 1)
                found = there[place] == mine
                self.matched.append((receives[found], sends[at[place[found]]]))

    def edges(self) -> list[tuple[Column, Column]]:
        """A compute operation waits for its receive, and its send for it."""
        return [(c, m) if sends else (m, c) for c, m, sends in self._pairs]


def _stage_of_part(part: Column, stage: Column) -> Column:
    """Return the stage of each part of the model."""
    stages = np.zeros(int(part.max(initial=-1)) + 1, np.int64)
    stages[part] = stage
    if (stages[part] != stage).any():
        raise ValueError("a part of the model is computed on several stages; each needs one stage (column gmc)")
    return stages


def _carried(operations: Operations, worker: Column, rows: Column, computes: Column) -> tuple[Column, Column]:
    """Return messages with the compute operation of each, where there is one."""
    if not len(rows) or (operations.microbatch[rows] < 0).any():
        return _in_turn(worker, rows, computes)
    keys = _numbered(worker, operations.part, operations.microbatch)
    there, at = np.unique(keys[computes], return_index=True)
    if not len(there):
        return rows[:0], rows[:0]
    place = np.minimum(np.searchsorted(there, keys[rows]), len(there) - 1)
    found = there[place] == keys[rows]
    return rows[found], computes[at[place[found]]]


def _in_turn(worker: Column, rows: Column, others: Column) -> tuple[Column, Column]:
    """Pair the rows of each worker with its other rows, the first with the first and so on."""
    own, theirs = worker[rows].astype(np.int64), worker[others].astype(np.int64)
    size = max(len(rows), len(others), 1)
    mine, there = own * size + _turn(own), theirs * size + _turn(theirs)
    place = np.minimum(np.searchsorted(there, mine), max(len(there) - 1, 0))
    found = there[place] == mine if len(there) else np.zeros(len(mine), bool)
    return rows[found], others[place[found]] if len(there) else others


def _turn(group: Column) -> Column:
    """Number the rows of each group; those of a group follow each other."""
    if not len(group):
        return group
    begins = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    count = np.diff(np.concatenate([begins, [len(group)]]))
    return np.arange(len(group)) - np.repeat(begins, count)


# Who starts together.


def widest_groups(operations: Operations) -> Column:
    """Return how widely each kind synchronises, as far as the recording agrees: 0 all workers, 1 a replica, 2 nobody.

    Who takes part in a call begins it before anyone ends it.
    """
    found = np.full(len(KINDS), 2)
    for number, kind in enumerate(KINDS):
        rows = np.flatnonzero(operations.kind == number)
        if kind.peers != "widest" or not len(rows):
            continue
        begin, end = operations.begin[rows], operations.begin[rows] + operations.duration[rows]
        for width in (0, 1):
            call = _calls(operations, rows, [operations.replica] * (width == 1))
            latest, first = np.full(call.max() + 1, -np.inf), np.full(call.max() + 1, np.inf)
            np.maximum.at(latest, call, begin)
            np.minimum.at(first, call, end)
            if (latest > first + TOLERANCE).mean() <= CONTRADICTED:
                found[number] = width
                break
    return found


def _calls(operations: Operations, rows: Column, apart: list[Column]) -> Column:
    """Number the calls of a collective: the first of each worker is one call, and so on; ``apart`` keeps some apart."""
    worker = _numbered(operations.step[rows], operations.replica[rows], operations.stage[rows], operations.chunk[rows])
    order = np.argsort(worker, kind="stable")
    turn = np.empty(len(rows), np.int64)
    turn[order] = _turn(worker[order])
    return _numbered(operations.step[rows], operations.chunk[rows], turn, *(column[rows] for column in apart))


def _units(operations: Operations, messages: _Messages, widest: Column) -> tuple[Column, int]:
    """Return the unit of each operation, and how many messages lack a peer."""
    unit = np.arange(len(operations))
    paired = 0
    for receives, sends in messages.matched:
        unit[receives] = sends
        paired += 2 * len(sends)
    for number, kind in enumerate(KINDS):
        rows = np.flatnonzero(operations.kind == number)
        if not len(rows) or kind.role == "message":
            continue
        if kind.peers == "replicas":
            apart = [operations.stage]
        elif kind.peers == "ends" or (kind.peers == "widest" and widest[number] == 1):
            apart = [operations.replica]
        elif kind.peers == "named" or (kind.peers == "widest" and widest[number] == 0):
            apart = []
        else:
            continue
        _, at, call = np.unique(_calls(operations, rows, apart), return_index=True, return_inverse=True)
        unit[rows] = rows[at[call]]
    return np.unique(unit, return_inverse=True)[1], messages.count - paired


# The order of the replay.


def _levelled(step: Column, unit: Column, source: Column, target: Column, count: int, alone: int) -> OperationGraph:
    """Put units into levels, and everything into the order of these."""
    units = int(unit.max()) + 1
    by_unit = np.argsort(unit[source], kind="stable")
    out_target = target[by_unit]
    first_out = np.searchsorted(unit[source][by_unit], np.arange(units + 1))
    waiting = np.bincount(target, minlength=units)
    ready = np.flatnonzero(waiting == 0)
    levels = []
    while len(ready):
        levels.append(ready)
        reached = out_target[_ranges(first_out[ready], first_out[ready + 1])]
        next_up, times = np.unique(reached, return_counts=True)
        waiting[next_up] -= times
        ready = next_up[waiting[next_up] == 0]
    order = np.concatenate(levels)
    if len(order) < units:
        raise ValueError(
            f"{units - len(order)} operations wait for each other in a circle, so the trace cannot be replayed; the "
            "times of its workers contradict each other"
        )
    place = np.empty(units, np.int64)
    place[order] = np.arange(units)
    row = np.argsort(place[unit], kind="stable")
    number = np.empty(count, np.int64)
    number[row] = np.arange(count)
    own_unit = place[unit][row]
    by_target = np.argsort(place[target], kind="stable")
    unit_ends = np.cumsum([len(level) for level in levels])
    row_ends = np.searchsorted(own_unit, unit_ends)
    bounds = zip([0, *unit_ends[:-1]], unit_ends, [0, *row_ends[:-1]], row_ends, strict=True)
    waited_for = np.zeros(count, bool)
    waited_for[source] = True
    last = np.flatnonzero(~waited_for)
    return OperationGraph(
        row=row.astype(np.int32),
        unit=own_unit.astype(np.int32),
        source=number[source[by_target]].astype(np.int32),
        first_source=np.searchsorted(place[target][by_target], np.arange(units + 1)).astype(np.int32),
        levels=tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in bounds),
        last=number[last].astype(np.int32),
        first_last=np.flatnonzero(np.concatenate([[True], step[last][1:] != step[last][:-1]])),
        alone=alone,
    )


def _ranges(begin: Column, end: Column) -> Column:
    """Return the numbers from each begin to its end, one range after the other."""
    length = end - begin
    return np.repeat(begin - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))


def _numbered(*columns: Column) -> Column:
    """Number the different combinations of values in some columns, in their order."""
    code: Column = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, which = np.unique(column, return_inverse=True)
        code = code * len(values) + which
        if len(code) and code.max() > 2**40:
            code = np.unique(code, return_inverse=True)[1]
    return np.unique(code, return_inverse=True)[1]
