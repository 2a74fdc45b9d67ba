"""Where the time of every step went: computing, each loss inside windows, and what lies between them.

A step's period is the sum of its parts. Inside windows, they are the means over the partitions, or over the ranks
where each has several and computes for one at a time; outside, what the main thread did, or while it waited for another
rank, what that one did. Of this each moment counts once: communication before data loading, before checkpoints, before
the optimizer that may have caused them. What is left is between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipesight.analysis.bubble_losses import LOSSES, WindowSplit
from pipesight.analysis.step_grouping import EVALUATION, MiniBatchTable, StepTable
from pipesight.analysis.step_times import OUTSIDE, PARTS, StepTimes
from pipesight.runs.reading.event_codes import CHECKPOINT, COMMUNICATION, DATA, OPTIMIZER
from pipesight.runs.reading.event_tables import Column, Spans

__all__ = ["KINDS", "Cover", "break_down", "overlapping"]

KINDS = {
    COMMUNICATION: "communication",
    DATA: "data_loading",
    CHECKPOINT: "checkpoints",
    OPTIMIZER: "optimizer",
}
"""Kinds of spans of the main thread. Where several are open, the first in this order counts."""

_EVER = np.iinfo(np.int64).max // 2


def break_down(
    steps: StepTable,
    minibatches: MiniBatchTable,
    splits: Sequence[WindowSplit],
    *,
    all_minibatches: MiniBatchTable,
    spans: Spans,
    replicas: Mapping[int, int],
) -> StepTimes:
    """Say where the time of complete steps went.

    ``splits`` are of ``minibatches``; ``all_minibatches`` has also those of no step: evaluations.
    """
    inside = np.zeros((1 + len(LOSSES), len(minibatches)))
    busy, bound, turnaround = np.zeros((3, len(minibatches)))
    for split in splits:
        busy[split.rows] = split.worker_busy.mean(axis=1)
        crowded = split.crowded.sum(axis=1) / split.worker_busy.shape[1]
        inside[0, split.rows] = busy[split.rows] - crowded
        inside[1:, split.rows] = split.worker_losses.mean(axis=2)
        inside[1 + LOSSES.index("sharing"), split.rows] += crowded
        bound[split.rows], turnaround[split.rows] = split.bound, split.turnaround
    window = minibatches.end - minibatches.begin
    step_of, members = np.repeat(np.arange(len(steps)), steps.count), steps.members()

    def per_step(values: Column) -> NDArray[np.float64]:
        return np.bincount(step_of, values[members], len(steps)).astype(float)

    windows = np.maximum(per_step(window), 1)
    parts = np.zeros((len(PARTS), len(steps)))
    for k, part in enumerate(inside):
        parts[k] = per_step(part)
    period = steps.end - steps.begin
    covered = np.zeros(len(steps))
    trained = bool((all_minibatches.kind != EVALUATION).any())
    own_steps, own_minibatches = _Groups(steps.replica), _Groups(all_minibatches.replica)
    own_spans = _Groups(spans.rank)
    for replica in np.unique(steps.replica).tolist():
        mine = own_steps.rows(replica)
        own = all_minibatches.where(own_minibatches.rows(replica))
        apart = (own.kind == EVALUATION) & trained
        ranks = [spans.where(own_spans.rows(rank)) for rank, number in replicas.items() if number == replica]
        inner, outer = _outside(steps.where(mine), own.where(~apart), own.where(apart), ranks)
        covered[mine] = inner
        parts[1 + len(LOSSES) :, mine] = outer
    # Pipelines that run at the same time share it.
    parts[: 1 + len(LOSSES)] *= covered / windows
    complete = np.flatnonzero(steps.complete & (period > 0))
    return StepTimes(
        replica=steps.replica,
        step=steps.step,
        begin=steps.begin,
        period=period,
        follows=steps.follows,
        window=covered.astype(np.int64),
        minibatches=steps.count,
        microbatches=per_step(minibatches.chunks).astype(np.int64),
        samples=np.where(per_step(minibatches.samples < 0) > 0, -1, per_step(minibatches.samples)).astype(np.int64),
        bubble=1 - per_step(busy) / windows,
        bound=per_step(bound * window) / windows,
        turnaround=per_step(turnaround) * covered / windows,
        parts=parts,
    ).where(complete)


def _outside(
    steps: StepTable, windows: MiniBatchTable, evaluations: MiniBatchTable, ranks: Sequence[Spans]
) -> tuple[Column, NDArray[np.float64]]:
    """Return how much of each period windows cover, and the parts outside of them, as means over the ranks."""
    inner = Cover(windows.begin, windows.end)
    before = inner.within(steps.begin, steps.end)
    parts = dict.fromkeys(OUTSIDE, np.zeros(len(steps)))
    begins, ends = [windows.begin, evaluations.begin], [windows.end, evaluations.end]
    with_evaluations = Cover(np.concatenate(begins), np.concatenate(ends)).within(steps.begin, steps.end)
    parts["evaluation"] = (with_evaluations - before).astype(float)
    present = [spans for spans in ranks if len(spans)]
    for own in present:
        reached = with_evaluations
        covers_begin, covers_end = list(begins), list(ends)
        for kind, name in KINDS.items():
            chosen = own.where(own.kind == kind)
            if len(chosen):
                covers_begin.append(chosen.begin)
                covers_end.append(chosen.end)
                cover = Cover(np.concatenate(covers_begin), np.concatenate(covers_end))
                further = cover.within(steps.begin, steps.end)
                parts[name] = parts[name] + (further - reached) / len(present)
                reached = further
    period = steps.end - steps.begin
    parts["between_steps"] = np.maximum(period - before - sum(parts.values()), 0)
    return before, np.stack([parts[name] for name in OUTSIDE])


class _Groups:
    """The rows of each value of a column."""

    def __init__(self, column: Column) -> None:
        self._order = np.argsort(column, kind="stable")
        self._sorted = column[self._order]

    def rows(self, value: int) -> Column:
        """Return the rows that have a value, in their order."""
        first, last = np.searchsorted(self._sorted, [value, value + 1])
        return self._order[first:last]


class Cover:
    """The time that spans cover; where they overlap, it counts once."""

    def __init__(self, begin: Column, end: Column) -> None:
        order = np.argsort(begin, kind="stable")
        begin, reached = begin[order], np.maximum.accumulate(end[order])
        new = np.ones(len(begin), bool)
        new[1:] = begin[1:] > reached[:-1]
        last = np.append(new[1:], True) if len(new) else new
        self.begin, self.end = begin[new], reached[last]
        lengths = self.end - self.begin
        self._before = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def total(self) -> int:
        """How much time they cover."""
        return int(self._before[-1])

    def _until(self, times: Column) -> Column:
        at = np.searchsorted(self.begin, times, side="right") - 1
        inside = np.minimum(times, self.end[at]) - self.begin[at]
        return np.where(at < 0, 0, self._before[at] + inside)

    def within(self, begin: Column, end: Column) -> Column:
        """Return how much lies between two times each."""
        if not len(self.begin):
            return np.zeros(len(begin), np.int64)
        return self._until(end) - self._until(begin)

    def joined(self, other: Cover) -> Cover:
        """Return what either covers."""
        return Cover(np.concatenate([self.begin, other.begin]), np.concatenate([self.end, other.end]))

    def outside(self, other: Cover) -> tuple[Column, Column]:
        """Return the begins and ends of what the other does not cover."""
        return overlapping(self.begin, self.end, *other.complement())[1:3]

    def complement(self) -> tuple[Column, Column]:
        """Return the begins and ends of the times between the spans, before them and after them."""
        edges = np.array([-_EVER]), np.array([_EVER])
        return np.concatenate([edges[0], self.end]), np.concatenate([self.begin, edges[1]])


def overlapping(
    begin: Column, end: Column, other_begin: Column, other_end: Column
) -> tuple[Column, Column, Column, Column]:
    """Return where spans overlap others, which follow each other: the row of the one, begin, end, that of the other."""
    first = np.searchsorted(other_end, begin, side="right")
    count = np.maximum(np.searchsorted(other_begin, end, side="left") - first, 0)
    row = np.repeat(np.arange(len(begin)), count)
    which = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(row))
    return row, np.maximum(begin[row], other_begin[which]), np.minimum(end[row], other_end[which]), which
