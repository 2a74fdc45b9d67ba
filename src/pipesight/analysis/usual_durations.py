"""What computing takes a worker, and why: its stage, the worker itself, the micro-batch, or none of these.

The usual duration of a kind of computing in a part of the model is the median over its evened micro-batches; of the
workers that run the same part in other replicas, the middle one, and of two, the faster. So a slow worker does not make
its stage long, and a long stage makes none of its workers slow.

A micro-batch is long if *another* kind of computing shows it too, in *other* stages: what the forward of one stage
takes is explained by the backward of the same micro-batch elsewhere. Long sequences show in both; a slow worker, a
pause or a busy machine does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipesight.analysis.operation_graph import BACKWARD, FORWARD
from pipesight.runs.reading.event_tables import Column, Operations
from pipesight.runs.reading.operation_kinds import KINDS

__all__ = ["UsualDurations", "usual_before", "usual_durations"]

FEWEST = 3
"""Micro-batches, from which their durations can be correlated."""
CHANCE = 3.0
"""Standard deviations of a mean that chance explains."""
TINY = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class UsualDurations:
    """Durations of all operations if one cause was removed. Communications keep their transfers."""

    usual: Column
    """What the same takes usually, in the same part of the model."""
    usual_even: Column
    """The same once no part of the model takes longer than the mean of all."""
    even_stages: Column
    """The ratio to the recorded ones if no part of the model took longer than the mean of all."""
    even_microbatches: Column
    """The same if all micro-batches took the same."""
    stages: Column
    """What a micro-batch usually takes in each stage, forward and backward together."""
    correlation: float | None
    """Of forwards with backwards of the same micro-batches, over all; ``None`` with fewer than three of them."""


def usual_durations(operations: Operations, durations: Column) -> UsualDurations:
    """Find what operations usually take.

    Durations of communications are without waiting.
    """
    even_microbatches, correlation = _even_microbatches(operations, durations)
    usual, even_stages = durations * even_microbatches, np.ones(len(durations))
    stages = np.zeros(int(operations.stage.max()) + 1)
    for number, kind in enumerate(KINDS):
        rows = np.flatnonzero(operations.kind == number)
        if kind.is_communication or not len(rows):
            continue
        if number not in (FORWARD, BACKWARD) and (operations.part[rows] < 0).any():
            usual[rows] = _by_part(np.zeros(len(rows), np.int64), _worker(operations, rows), usual[rows])[0]
            continue
        part = _part(operations, rows)
        by_part = _by_part(part, operations.replica[rows], usual[rows])
        usual[rows] = by_part[part]
        there, at = np.unique(part, return_index=True)
        even_stages[rows] = np.minimum(by_part[there].mean() / np.maximum(by_part[part], TINY), 1.0)
        np.add.at(stages, operations.stage[rows[at]], by_part[there])
    return UsualDurations(usual, usual * even_stages, even_stages, even_microbatches, stages, correlation)


def usual_before(
    before: Operations, took: Column, after: Operations, durations: Column
) -> tuple[UsualDurations, UsualDurations]:
    """Find what operations took before some step: each worker is compared with itself, each link too.

    ``before`` are operations of the steps before, ``after`` those from there on, of the same workers. ``took`` and
    ``durations`` are theirs; of communications, without waiting.

    Returns:
        For the operations before, and for those after, what the same took at the median before: communications, too.
        ``stages`` says how much longer than before each stage takes on all of its replicas.
    """
    both = Operations.joined(before, after)
    was, now = usual_durations(before, took), usual_durations(after, durations)
    every = np.concatenate([took * was.even_microbatches, durations * now.even_microbatches])
    _, code = np.unique(
        np.stack([both.replica, both.stage, both.kind, both.part, both.chunk]), axis=1, return_inverse=True
    )
    code = code.ravel()
    medians = np.full(int(code.max()) + 1, np.nan)
    early = np.arange(len(every)) < len(before)
    order = np.lexsort((every[early], code[early]))
    begins = np.flatnonzero(np.concatenate([[True], np.diff(code[early][order]) > 0]))
    count = np.diff(np.concatenate([begins, [len(order)]]))
    medians[code[early][order[begins]]] = every[early][order[begins + (count - 1) // 2]]
    usual = np.where(np.isnan(medians[code]), every, medians[code])  # what there was none of before is no change
    even, stages = np.ones(len(every)), np.zeros(int(both.stage.max()) + 1)
    for number, kind in enumerate(KINDS):
        rows = np.flatnonzero((both.kind == number) & (both.part >= 0))
        if kind.is_communication or not (early[rows].any() and not early[rows].all()):
            continue
        part, late = _part(both, rows), ~early[rows]
        own = rows[late]
        now_by_part = _by_part(part[late], both.replica[own], every[own])
        was_by_part = _by_part(part[late], both.replica[own], usual[own])
        even[own] = np.minimum(was_by_part / np.maximum(now_by_part, TINY), 1.0)[part[late]]
        there, at = np.unique(part[late], return_index=True)
        np.add.at(stages, both.stage[own[at]], (now_by_part - was_by_part)[there])
    only = np.where(both.stage == int(stages.argmax()), even, 1.0)
    was_usual, now_usual = usual[early], usual[~early]
    return (
        UsualDurations(was_usual, was_usual, only[early], was.even_microbatches, stages, was.correlation),
        UsualDurations(now_usual, now_usual, only[~early], now.even_microbatches, stages, now.correlation),
    )


def _part(operations: Operations, rows: Column) -> Column:
    part = operations.part[rows].astype(np.int64)
    return np.where(part < 0, operations.stage[rows], part)


def _worker(operations: Operations, rows: Column) -> Column:
    found: Column = operations.replica[rows].astype(np.int64) * (int(operations.stage.max()) + 1)
    return found + operations.stage[rows]


def _by_part(part: Column, worker: Column, durations: Column) -> Column:
    """Return the usual duration in each part: each worker's median, and of these the lower middle one."""
    code = part * (int(worker.max()) + 1) + worker
    order = np.lexsort((durations, code))
    begins = np.flatnonzero(np.concatenate([[True], np.diff(code[order]) > 0]))
    count = np.diff(np.concatenate([begins, [len(code)]]))
    medians = durations[order[begins + (count - 1) // 2]]
    parts = part[order[begins]]
    order = np.lexsort((medians, parts))
    begins = np.flatnonzero(np.concatenate([[True], np.diff(parts[order]) > 0]))
    count = np.diff(np.concatenate([begins, [len(parts)]]))
    found = np.zeros(int(part.max()) + 1)
    found[parts[order[begins]]] = medians[order[begins + (count - 1) // 2]]
    return found


def _even_microbatches(operations: Operations, durations: Column) -> tuple[Column, float | None]:
    """Return the ratios of even micro-batches to recorded ones, and the correlation of forwards with backwards."""
    even = np.ones(len(durations))
    layouts = [_Grid(operations, durations, kind) for kind in (FORWARD, BACKWARD)]
    forward, backward = layouts
    if not forward.is_whole or not backward.is_whole:
        return even, None
    there = forward.there & backward.there
    if there.sum() < FEWEST:
        return even, None
    for own, other in ((forward, backward), (backward, forward)):
        table, others = own.deviations(there), other.deviations(there)
        parts = table.shape[1]
        for j in range(parts):
            elsewhere = (others.sum(axis=1) - (others[:, j] if parts > 1 else 0)) / max(parts - 1, 1)
            power = float(elsewhere @ elsewhere)
            slope = max(float(table[:, j] @ elsewhere) / power, 0.0) if power > 0 else 0.0
            mine = own.part == j
            explained = slope * elsewhere[own.microbatch[mine]] * own.mean[mine]
            taken = durations[own.rows[mine]]
            even[own.rows[mine]] = np.clip(taken - explained, 0.0, None) / np.maximum(taken, TINY)
    first, second = (grid.deviations(there)[there].mean(axis=1) for grid in layouts)
    return even, float(np.corrcoef(first, second)[0, 1]) if first.std() > 0 and second.std() > 0 else None


class _Grid:
    """The durations of one kind of computing, as a row per micro-batch and a column per part of the model."""

    def __init__(self, operations: Operations, durations: Column, kind: int) -> None:
        self.rows = np.flatnonzero(operations.kind == kind)
        own = operations.where(self.rows)
        self.is_whole = len(self.rows) > 0 and bool((own.microbatch >= 0).all())
        if not self.is_whole:
            return
        self.part = _part(operations, self.rows)
        replicas, self._microbatches = int(operations.replica.max()) + 1, int(operations.microbatch.max()) + 1
        _, step = np.unique(operations.step, return_inverse=True)
        count = (int(step.max()) + 1) * replicas * self._microbatches
        self.microbatch = (step[self.rows] * replicas + own.replica) * self._microbatches + own.microbatch
        lane = self.part * replicas + own.replica
        mean = np.bincount(lane, durations[self.rows]) / np.maximum(np.bincount(lane), 1)
        self.mean = np.maximum(mean[lane], TINY)
        self._table = np.full((count, int(operations.part.max(initial=operations.stage.max())) + 1), np.nan)
        self._table[self.microbatch, self.part] = durations[self.rows] / self.mean - 1
        self.there = np.isfinite(self._table).all(axis=1)
        self._replicas = replicas
        self._means = np.full((self._table.shape[1], replicas), np.nan)
        self._means[self.part, own.replica] = self.mean

    def deviations(self, there: Column) -> Column:
        """Return by which share each duration is longer than the mean of its worker, 0 for rows that are not there."""
        table = np.where(there[:, None], self._table, 0.0)
        if table.shape[1] > 1:
            table += there[:, None] * np.repeat(self._by_chance(table, there), self._microbatches)[:, None]
        else:
            # There is no other stage: a worker that is slow for a while would look like long micro-batches.
            steps, own = table.reshape(-1, self._microbatches), there.reshape(-1, self._microbatches)
            steps -= own * (steps.sum(axis=1) / np.maximum(own.sum(axis=1), 1))[:, None]
        return table

    def _by_chance(self, table: Column, there: Column) -> Column:
        """Return by which share all stages of each replica are slower, where its micro-batches explain it.

        They do where so few, of lengths that differ so much, may well have such a mean. A row for each step.
        """
        over = self._means / np.nanmean(self._means, axis=1, keepdims=True) - 1
        least, most = over.min(axis=0), over.max(axis=0)
        common = np.where(least > 0, least, np.where(most < 0, most, 0.0))
        own = np.where(there, table.mean(axis=1), 0.0).reshape(-1, self._replicas, self._microbatches)
        count = np.maximum(there.reshape(own.shape).sum(axis=(0, 2)), 1)
        chance = CHANCE * np.sqrt((own**2).sum(axis=(0, 2))) / count
        common = np.nan_to_num(np.where(np.abs(common) <= chance, common, 0.0))
        return np.tile(common, len(own))
