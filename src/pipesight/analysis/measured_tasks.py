"""Mini-batches that were recorded, task by task: how long each ran, and how late it began.

A task could have begun when its device was done with the one before and its input was there::

    device 1   | F0 |      | F1 |         F1 could have begun when F0 ended, or F1 of device 0, whichever was later;
    device 0     | F1 |  ^ |              from then until it began is its gap

Gaps are negative where a task begins before the one it waits for ends, as backwards do: they hand gradients on first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipesight.analysis.step_grouping import MiniBatchTable
from pipesight.runs.reading.event_tables import Tasks
from pipesight.schedule.contention import Concurrency
from pipesight.schedule.costs import SPLIT_COST
from pipesight.schedule.simulation import Times, simulate
from pipesight.schedule.task_orders import KINDS, B, F, R, Schedule, W

__all__ = ["MeasuredTasks"]


class MeasuredTasks:
    """Mini-batches with the same tasks. Times are microseconds from the first forward of each, mini-batches last.

    The ``schedule`` is the order that most of them have; ``rates`` say how fast each of 1, 2, ... devices computes
    while so many do.
    """

    def __init__(
        self, minibatches: MiniBatchTable, tasks: Tasks, schedule: Schedule, rates: Sequence[float] = ()
    ) -> None:
        self.schedule, self._rates = schedule, rates
        self.n, self.m = int(minibatches.partitions[0]), int(minibatches.chunks[0])
        count = len(minibatches)
        place = minibatches.first[:, None] + np.arange(int(minibatches.count[0]))
        which = np.broadcast_to(np.arange(count)[:, None], place.shape)
        begin, end = (column[place] - minibatches.begin[:, None] for column in (tasks.begin, tasks.end))
        kind, stage, i = (column[place] for column in (tasks.phase, tasks.partition, tasks.microbatch))
        shape = (len(KINDS), self.n, self.m, count)
        self.begin, self.end, free = (np.full(shape, np.nan) for _ in range(3))
        self.begin[kind, stage, i, which], self.end[kind, stage, i, which] = begin, end
        self.lengths: Times = np.full(shape, np.nan)
        """How long each task computes; less than it took if devices slowed each other down."""
        self.lengths[kind, stage, i, which] = Concurrency(begin, end).work(rates)
        device = np.asarray(schedule.device_of_stage)[stage]
        turn = np.lexsort((begin, device), axis=1)
        device, ended = np.take_along_axis(device, turn, 1), np.take_along_axis(end, turn, 1)
        before = np.zeros(ended.shape)  # when a device was done with the task before
        before[:, 1:] = np.where(np.diff(device, axis=1) == 0, ended[:, :-1], 0)
        at = tuple(np.take_along_axis(column, turn, 1) for column in (kind, stage, i))
        free[(*at, which)] = before
        forwards = np.nanmax(self.end[F], axis=(0, 1))
        others = np.nanmin(np.where(np.isnan(self.begin[R:]), np.inf, self.begin[R:]), axis=(0, 1, 2))
        self.losses: Times = np.maximum(others - forwards, 0.0) if schedule.joined else np.zeros(count)
        """From the last forward to the first task after it."""
        self.gaps: Times = self.begin - np.maximum(free, self._ready(forwards + self.losses))

    def _ready(self, joined: Times) -> Times:
        """Return when the input of each task had arrived."""
        ready = np.zeros_like(self.begin)
        ready[F, 1:], ready[B, :-1] = self.end[F, :-1], self.end[B, 1:]
        ready[B, -1] = joined if self.schedule.joined else self.end[F, -1]
        ready[R] = joined if self.schedule.joined else 0.0
        ready[B + 1] = self.end[B]
        return np.nan_to_num(ready)

    @property
    def checkpoint(self) -> str:
        """The checkpoint mode."""
        again = ~np.isnan(self.begin[R]).all(axis=(0, 2))
        return "never" if not again.any() else "always" if again[-1] else "except_last"

    @property
    def loss(self) -> float:
        """The mean time between forwards and backwards."""
        return float(self.losses.mean())

    def mean_lengths(self) -> Times:
        """Return the mean time of a task, by kind and partition; 0 where there is none."""
        return _means(self.lengths, axis=(2, 3))

    def whole_lengths(self, *, computing: bool = True) -> Times:
        """Return the same, but with backwards as a whole: where weights have tasks of their own, these are added.

        What splitting them cost is left out. Without ``computing``, it is the time that tasks took.
        """
        lengths = self.lengths if computing else self.end - self.begin
        sums, counts = np.nansum(lengths, axis=(2, 3)), (~np.isnan(lengths)).sum(axis=(2, 3))
        in_two = self.schedule.split.any(axis=1) & (np.arange(self.n) > 0)  # but for those that lead to no input
        sums[B], sums[W] = (sums[B] + sums[W]) / (1 + SPLIT_COST * in_two), 0.0
        return np.asarray(sums / np.maximum(counts, 1))

    def mean_gaps(self) -> Times:
        """Return the mean gap before a task, by kind."""
        return _means(self.gaps, axis=(1, 2, 3))

    def makespans(self) -> tuple[float, float]:
        """Return what simulating the schedule gives in the mean times of tasks, and in each task's own, on average."""
        delays = np.zeros((2, self.n, 1))
        delays[1, -1] = self.loss
        gaps = self.mean_gaps()
        even = simulate(self.schedule, self.mean_lengths()[:, :, None], delays=delays, gaps=gaps, rates=self._rates)
        own, late = np.nan_to_num(self.lengths), delays[..., None]
        uneven = simulate(self.schedule, own, delays=late, gaps=gaps, rates=self._rates)
        return float(even.makespan), float(uneven.makespan.mean())

    def example(self) -> tuple[Times, Times]:
        """Return begins and ends of the mini-batch whose length is the median."""
        lengths = np.nanmax(self.end, axis=(0, 1, 2))
        middle = int(np.argsort(lengths)[len(lengths) // 2])
        return self.begin[..., middle], self.end[..., middle]

    def bubble(self, makespan: float) -> float:
        """Return the share of a window of that length in which devices would be idle."""
        busy = np.nansum(self.end - self.begin) / self.schedule.devices / self.begin.shape[-1]
        return float(max(0.0, 1 - busy / max(makespan, 1e-9)))


def _means(times: Times, axis: tuple[int, ...]) -> Times:
    there = ~np.isnan(times)
    return np.asarray(np.where(there, times, 0.0).sum(axis=axis) / np.maximum(there.sum(axis=axis), 1))
