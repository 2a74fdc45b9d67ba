"""Where the time of every step went: computing, each loss inside windows, and what lies between them.

A step's period is the sum of its parts. Inside windows, they are the means over the partitions, or over the ranks
where each has several and computes for one at a time; outside, what the main thread did, or while it waited for another
rank, what that one did. Of this each moment counts once: communication before data loading, before checkpoints, before
the optimizer that may have caused them. What is left is between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesight.analysis.bubble_losses import LOSSES, WindowSplit
from pipesight.analysis.step_grouping import EVALUATION, MiniBatchTable, StepTable
from pipesight.runs.reading.event_codes import CHECKPOINT, COMMUNICATION, DATA, OPTIMIZER
from pipesight.runs.reading.event_tables import Column, Spans

__all__ = ["KINDS", "OUTSIDE", "PARTS", "Cover", "StepTimes", "Summary", "break_down", "summary", "warm_up"]

OUTSIDE = ("evaluation", "data_loading", "optimizer", "checkpoints", "communication", "between_steps")
"""What a step does outside the windows of its mini-batches."""
PARTS = ("computing", *LOSSES, *OUTSIDE)
"""All parts of a step."""

KINDS = {
    COMMUNICATION: "communication",
    DATA: "data_loading",
    CHECKPOINT: "checkpoints",
    OPTIMIZER: "optimizer",
}
"""Kinds of spans of the main thread. Where several are open, the first in this order counts."""

_EVER = np.iinfo(np.int64).max // 2
WARM_UP = 1.5
"""Steps at the beginning that take this many times the median of those around them are warm-up."""
FIRST = 10
"""The most steps that can be warm-up."""
AROUND = 5
"""The median is taken over this many times as many steps."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A quantity over steps: its median, and where the middle 80% lie."""

    median: float
    """The median."""
    low: float
    """The 10th percentile."""
    high: float
    """The 90th percentile."""
    mean: float
    """The mean."""
    least: float
    """The smallest value."""
    most: float
    """The largest value."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Complete steps, one after the other; times in microseconds. The ``parts`` of a step add up to its ``period``."""

    replica: Column
    """The replica that ran the step."""
    step: Column
    """Its number."""
    begin: Column
    """When its first forward began."""
    period: Column
    """From there to the first forward of the next step."""
    follows: Column
    """Whether the period ends where the next step begins; of others, not all was recorded."""
    window: Column
    """The sum over its mini-batches."""
    minibatches: Column
    """How many it has."""
    microbatches: Column
    """How many it has."""
    bubble: NDArray[np.float64]
    """The share of its windows in which partitions are idle."""
    bound: NDArray[np.float64]
    """The bubble of its schedule alone."""
    turnaround: NDArray[np.float64]
    """The part of the host gaps between forward and backward."""
    parts: NDArray[np.float64]
    """By part, in the order of `PARTS`, and step."""

    def __len__(self) -> int:
        return len(self.step)

    def where(self, rows: Column) -> StepTimes:
        """Return some of the steps."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return StepTimes(**{name: column[..., rows] for name, column in columns.items()})

    def mean_parts(self) -> dict[str, float]:
        """Return the parts of the mean step, by name."""
        return {name: float(part.mean()) for name, part in zip(PARTS, self.parts, strict=True)}

    def over_replicas(self) -> StepTimes:
        """Return one row a step, by number: it takes as long as its slowest replica; shares and parts are means."""
        numbers, which = np.unique(self.step, return_inverse=True)
        count = np.bincount(which)

        def mean(values: NDArray[Any]) -> NDArray[np.float64]:
            return np.bincount(which, values, len(numbers)) / count

        def total(values: Column) -> Column:
            return np.bincount(which, values, len(numbers)).astype(np.int64)

        period = np.zeros(len(numbers), np.int64)
        np.maximum.at(period, which, self.period)
        begin = np.full(len(numbers), _EVER)
        np.minimum.at(begin, which, self.begin)
        return StepTimes(
            replica=np.zeros(len(numbers), np.int64),
            step=numbers,
            begin=begin,
            period=period,
            follows=total(self.follows) == count,
            window=mean(self.window).astype(np.int64),
            minibatches=total(self.minibatches),
            microbatches=total(self.microbatches),
            bubble=mean(self.bubble),
            bound=mean(self.bound),
            turnaround=mean(self.turnaround),
            parts=np.stack([mean(part) for part in self.parts]),
        )

    @classmethod
    def none(cls) -> StepTimes:
        """Return no steps."""
        columns: dict[str, Any] = {field.name: np.zeros(0, np.int64) for field in fields(cls)}
        return cls(**{**columns, "bubble": np.zeros(0), "bound": np.zeros(0), "parts": np.zeros((len(PARTS), 0))})


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

    Args:
        steps: All steps.
        minibatches: Theirs; ``splits`` are of these.
        splits: Where the windows went.
        all_minibatches: Also those of no step: evaluations.
        spans: What the main threads did.
        replicas: Which one each rank belongs to.
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

    def complement(self) -> tuple[Column, Column]:
        """Return the begins and ends of the times between the spans, before them and after them."""
        edges = np.array([-_EVER]), np.array([_EVER])
        return np.concatenate([edges[0], self.end]), np.concatenate([self.begin, edges[1]])


def warm_up(times: StepTimes) -> Column:
    """Return the numbers of the first steps that took much longer than those after them.

    They are three at most, or a tenth of all steps, up to `FIRST`. A run that is slow for longer was slow: its
    first steps are compared with those that come next, not with what the run came to in the end.
    """
    merged = times.over_replicas()
    numbers, period = merged.step, merged.period
    if len(numbers) < 5:
        return numbers[:0]
    most = max(3, min(len(numbers) // 10, FIRST))
    slow = period > WARM_UP * np.median(period[: AROUND * most])
    return numbers[: min(int(np.argmin(slow)), most)]


def summary(values: Column) -> Summary:
    """Summarise a quantity over steps.

    >>> summary(np.array([1, 2, 3])).median
    2.0
    """
    low, median, high = np.quantile(values, [0.1, 0.5, 0.9]).tolist()
    return Summary(median, low, high, float(values.mean()), float(values.min()), float(values.max()))
