"""Mini-batches that were recorded, task by task: how long each ran, and how late it began.

A task could have begun when its device was done with the one before and its input was there::

    device 1   | F0 |      | F1 |         F1 could have begun when F0 ended, or F1 of device 0, whichever was later;
    device 0     | F1 |  ^ |              from then until it began is its gap

Gaps are negative where a task begins before the one it waits for ends, as backwards do: they hand gradients on first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesight.plan.schedules import KINDS, B, F, R, Schedule, W, recorded
from pipesight.plan.simulation import Times
from pipesight.report.analysis.windows import MiniBatches
from pipesight.report.reading.tables import Tasks

__all__ = ["Windows"]


class Windows:
    """Mini-batches with the same tasks. Times are microseconds from the first forward of each, mini-batches last."""

    def __init__(self, minibatches: MiniBatches, tasks: Tasks, homes: Sequence[int]) -> None:
        self.n, self.m = int(minibatches.partitions[0]), int(minibatches.chunks[0])
        count = len(minibatches)
        place = minibatches.first[:, None] + np.arange(int(minibatches.count[0]))
        which = np.broadcast_to(np.arange(count)[:, None], place.shape)
        begin, end = (column[place] - minibatches.begin[:, None] for column in (tasks.begin, tasks.end))
        kind, stage, i = (column[place] for column in (tasks.phase, tasks.partition, tasks.microbatch))
        shape = (len(KINDS), self.n, self.m, count)
        self.begin, self.end, free = (np.full(shape, np.nan) for _ in range(3))
        self.begin[kind, stage, i, which], self.end[kind, stage, i, which] = begin, end
        device = np.asarray(homes)[stage]
        turn = np.lexsort((begin, device), axis=1)
        device, ended = np.take_along_axis(device, turn, 1), np.take_along_axis(end, turn, 1)
        before = np.zeros(ended.shape)  # when a device was done with the task before
        before[:, 1:] = np.where(np.diff(device, axis=1) == 0, ended[:, :-1], 0)
        at = tuple(np.take_along_axis(column, turn, 1) for column in (kind, stage, i))
        free[(*at, which)] = before
        forwards = np.nanmax(self.end[F], axis=(0, 1))
        others = np.nanmin(np.where(np.isnan(self.begin[R:]), np.inf, self.begin[R:]), axis=(0, 1, 2))
        # Nothing but forwards before all of them have ended: the loss needs all outputs.
        joined = bool((others >= forwards).mean() > 0.5)
        self.schedule = _most_common(np.stack(at, axis=-1), device, joined=joined)
        self.losses: Times = np.maximum(others - forwards, 0.0) if joined else np.zeros(count)
        """From the last forward to the first task after it."""
        self.gaps: Times = self.begin - np.maximum(free, self._ready(forwards + self.losses))

    def _ready(self, joined: Times) -> Times:
        """Return when the input of each task was there."""
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
        return _means(self.end - self.begin, axis=(2, 3))

    def whole_lengths(self) -> Times:
        """Return the same, but with backwards as a whole: where weights have tasks of their own, these are added."""
        lengths = self.end - self.begin
        sums, counts = np.nansum(lengths, axis=(2, 3)), (~np.isnan(lengths)).sum(axis=(2, 3))
        sums[B], sums[W] = sums[B] + sums[W], 0.0
        return np.asarray(sums / np.maximum(counts, 1))

    def mean_gaps(self) -> Times:
        """Return the mean gap before a task, by kind."""
        return _means(self.gaps, axis=(1, 2, 3))

    def durations(self) -> Times:
        """Return what the simulator needs to run the schedule in the mean times of tasks."""
        lengths = self.mean_lengths()
        return self._with_gaps(np.where(lengths > 0, lengths, np.nan)[:, :, None])

    def own_durations(self) -> Times:
        """Return the same with each task's own time, mini-batches last."""
        return self._with_gaps(self.end - self.begin)

    def _with_gaps(self, lengths: Times) -> Times:
        gaps = self.mean_gaps().reshape(-1, *[1] * (lengths.ndim - 1))
        times: Times = np.nan_to_num(np.maximum(lengths + gaps, 0.0))
        return times

    def delays(self) -> Times:
        """Return what stages wait for beside each other: the last one for the loss."""
        delays: Times = np.zeros((2, self.n, 1))
        delays[1, -1] = self.loss
        return delays

    def example(self) -> tuple[Times, Times]:
        """Return begins and ends of the mini-batch whose length is the median."""
        lengths = np.nanmax(self.end, axis=(0, 1, 2))
        middle = int(np.argsort(lengths)[len(lengths) // 2])
        return self.begin[..., middle], self.end[..., middle]

    def bubble(self, makespan: float | None = None) -> float:
        """Return the share of the window that devices did not compute or, in one of another length, would not."""
        busy = np.zeros(self.schedule.devices)
        np.add.at(busy, list(self.schedule.device_of_stage), np.nansum(self.end - self.begin, axis=(0, 2, 3)))
        length = np.nanmax(self.end, axis=(0, 1, 2)).mean() if makespan is None else makespan
        return float(1 - busy.mean() / self.begin.shape[-1] / max(length, 1e-9))


def _means(times: Times, axis: tuple[int, ...]) -> Times:
    there = ~np.isnan(times)
    return np.asarray(np.where(there, times, 0.0).sum(axis=axis) / np.maximum(there.sum(axis=axis), 1))


def _most_common(tasks: NDArray[np.int64], device: NDArray[np.int64], *, joined: bool) -> Schedule:
    """Return the order that most of the mini-batches have."""
    orders, counts = np.unique(tasks, axis=0, return_counts=True)
    order = orders[np.argmax(counts)]
    homes = device[0]  # the same in all: tasks are sorted by device
    lists = [order[homes == number] for number in range(int(homes.max()) + 1)]
    padded = np.full((len(lists), max(map(len, lists)), 3), -1)
    for number, own in enumerate(lists):
        padded[number, : len(own)] = own
    return recorded(padded, joined=joined)
