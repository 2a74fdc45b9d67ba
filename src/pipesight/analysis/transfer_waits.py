"""Transfers: which mini-batch each belongs to, and how long tasks waited for them."""

from __future__ import annotations

import numpy as np

from pipesight.analysis.minibatch_arrays import Lengths, MiniBatchArrays
from pipesight.analysis.step_grouping import MiniBatchTable
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD
from pipesight.runs.reading.event_tables import Column, Tasks, Transfers

__all__ = ["arrivals_of", "of_rows", "waits"]


def arrivals_of(minibatches: MiniBatchTable, tasks: Tasks, transfers: Transfers) -> Transfers:
    """Return the transfers of these mini-batches, with the row of theirs for ``minibatch``."""
    if not len(transfers):
        return transfers
    row = np.full(len(tasks), -1, np.int64)
    for r, (first, count) in enumerate(zip(minibatches.first.tolist(), minibatches.count.tolist(), strict=True)):
        row[first : first + count] = r
    known: dict[tuple[int, int, int], int] = {}
    keys = np.stack([tasks.rank, tasks.step, tasks.minibatch], axis=1).astype(np.int64)
    changes = np.flatnonzero((np.diff(keys, axis=0, prepend=keys[:1] - 1) != 0).any(axis=1))
    for at in changes.tolist():
        known.setdefault((int(keys[at, 0]), int(keys[at, 1]), int(keys[at, 2])), int(row[at]))
    wanted = zip(transfers.rank.tolist(), transfers.step.tolist(), transfers.minibatch.tolist(), strict=True)
    rows = np.array([known.get(key, -1) for key in wanted], np.int64)
    moved = Transfers(**{**transfers.columns(), "minibatch": rows, "begin": transfers.begin, "end": transfers.end})
    moved = moved.where(rows >= 0)
    start = minibatches.begin[moved.minibatch]
    return Transfers(**{**moved.columns(), "begin": moved.begin - start, "end": moved.end - start})


def of_rows(arrivals: Transfers, rows: Column, count: int) -> Transfers:
    """Return the transfers of some mini-batches, renumbered from 0."""
    if not len(arrivals):
        return arrivals
    number = np.full(count, -1, np.int64)
    number[rows] = np.arange(len(rows))
    mine = arrivals.where(number[arrivals.minibatch] >= 0)
    return Transfers(**{**mine.columns(), "minibatch": number[mine.minibatch]})


def waits(batch: MiniBatchArrays, arrivals: Transfers, durations: Lengths) -> tuple[Lengths | None, Lengths]:
    """Return the times of tasks with the transfers that their device waited for, and delays of those it did not.

    A transfer counts from the end of the task that made the tensor. If the device had nothing else to do by then, or
    moves tensors itself, between tasks, the next task begins that much later, whatever went before.
    """
    delays = np.zeros((2, *durations.shape[1:]))
    inside = (arrivals.partition < batch.n) & (arrivals.microbatch < batch.m) if len(arrivals) else np.zeros(0, bool)
    if not inside.any():
        return None, delays
    moved = arrivals.where(inside)
    begin, end, free = (batch.dense(x) for x in (batch.begin, batch.end, batch.device_is_free()))
    there = batch.dense(np.ones_like(batch.begin)) > 0
    b, j, i = moved.minibatch, moved.partition, moved.microbatch
    forward = moved.begin <= begin[FORWARD, j, i, b]
    phase = np.where(forward, FORWARD, BACKWARD)
    source = np.where(forward, j - 1, j + 1)
    known = (source >= 0) & (source < batch.n)
    source = np.clip(source, 0, batch.n - 1)
    known &= there[phase, source, i, b]
    made = np.where(known, end[phase, source, i, b], np.maximum(moved.begin, 0))
    arrived = np.minimum(moved.end, begin[phase, j, i, b])
    idle_from = np.maximum(free[phase, j, i, b], 0)
    waited = moved.begin >= idle_from
    real = there[phase, j, i, b]
    extra = np.zeros_like(durations)
    late = np.where(real & waited, np.maximum(arrived - np.maximum(made, idle_from), 0), 0)
    np.maximum.at(extra, (phase, j, i, b), late)
    late = np.where(real & ~waited, np.maximum(arrived - made, 0), 0)
    np.maximum.at(delays, (np.where(forward, 0, 1), j, i, b), late)
    return durations + extra, delays
