"""Mini-batches of one shape as arrays, and the orders in which devices ran their tasks."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipesight.runs.reading.event_codes import BACKWARD, FORWARD
from pipesight.runs.reading.event_tables import Column, Tasks
from pipesight.schedule.simulation import simulate
from pipesight.schedule.task_orders import Schedule, recorded

__all__ = ["Lengths", "MiniBatchArrays", "Times", "orders_of"]

MOST_ORDERS = 32
"""Mini-batches of one shape that run in more orders than this are simulated in the most common one."""

Times: TypeAlias = NDArray[np.int64]
Lengths: TypeAlias = NDArray[np.float64]


class MiniBatchArrays:
    """Mini-batches of one shape, as arrays: tasks by mini-batch, in the order of devices and time."""

    def __init__(self, tasks: Tasks, place: Column, start: Column, n: int, m: int, homes: Column) -> None:
        self.n, self.m, self.homes = n, m, homes
        self.rows = np.arange(len(place))
        begin, end = tasks.begin[place] - start[:, None], tasks.end[place] - start[:, None]
        partition = tasks.partition[place]
        code = (tasks.phase[place].astype(np.int64) * n + partition) * m + tasks.microbatch[place]
        by_device = np.argsort(homes[partition], axis=1, kind="stable")  # they are in order of time already
        self.begin, self.end, self.code = (np.take_along_axis(c, by_device, axis=1) for c in (begin, end, code))

    def where(self, rows: Column) -> MiniBatchArrays:
        """Return some of the mini-batches."""
        some = object.__new__(MiniBatchArrays)
        some.n, some.m, some.homes, some.rows = self.n, self.m, self.homes, self.rows[rows]
        some.begin, some.end, some.code = self.begin[rows], self.end[rows], self.code[rows]
        return some

    def by_tasks(self) -> list[MiniBatchArrays]:
        """Split by which tasks mini-batches have; they already have equally many."""
        _, which = np.unique(_hash(np.sort(self.code, axis=1)), return_inverse=True)
        return [self.where(which == number) for number in range(int(which.max()) + 1)]

    def dense(self, values: NDArray[Any]) -> Lengths:
        """Lay out values of tasks by phase, partition and micro-batch, mini-batches last; 0 where there is no task."""
        grid = np.zeros((4 * self.n * self.m, len(self.code)))
        grid[self.code.T, np.arange(len(self.code))] = values.T
        return grid.reshape(4, self.n, self.m, -1)

    def turnaround(self) -> Times:
        """Return the time from the last forward to the next task; 0 or less where they overlap."""
        forward = self.code // (self.n * self.m) == FORWARD
        latest = np.where(forward, self.end, 0).max(axis=1)
        earliest = np.where(forward, np.iinfo(np.int64).max, self.begin).min(axis=1)
        gap: Times = np.where(forward.all(axis=1), 0, earliest - latest)
        return gap

    def device_is_free(self) -> Times:
        """Return when the device of each task was done with the one before; -1 for its first."""
        device = self.homes[self.code // self.m % self.n]
        before = np.full_like(self.end, -1)
        before[:, 1:] = np.where(np.diff(device, axis=1) == 0, self.end[:, :-1], -1)
        return before


def orders_of(batch: MiniBatchArrays) -> list[tuple[Column, Schedule | None, Schedule | None]]:
    """Return mini-batches that ran in one order, and that order: with a device for each partition, and as it was."""
    hashes, first, which, counts = np.unique(
        _hash(batch.code), return_index=True, return_inverse=True, return_counts=True
    )
    common = np.argsort(-counts, kind="stable")
    if len(hashes) > MOST_ORDERS:
        which = np.where(np.isin(which, common[:MOST_ORDERS]), which, common[0])
    found = []
    for number in common[:MOST_ORDERS].tolist():
        group = np.flatnonzero(which == number)
        order = _Order(batch, int(first[number]), joined=_joined(batch.where(group)))
        found.append((group, order.schedule(np.arange(batch.n)), order.schedule(batch.homes)))
    return found


class _Order:
    """The tasks of one mini-batch in the order of time."""

    def __init__(self, batch: MiniBatchArrays, b: int, *, joined: bool) -> None:
        self._joined = joined
        by_time = np.argsort(batch.begin[b], kind="stable")
        code = batch.code[b][by_time]
        tasks = np.stack([code // (batch.n * batch.m), code // batch.m % batch.n, code % batch.m], axis=1)
        self._tasks = np.concatenate([tasks, self._missing(tasks, batch.n)])

    @staticmethod
    def _missing(tasks: Column, n: int) -> Column:
        """Return backwards of length 0 for partitions whose backward ran as part of another partition's."""
        backward = tasks[tasks[:, 0] == BACKWARD]
        have = np.unique(backward[:, 1])
        extra = [tasks[:0]]
        for j in range(n - 1, int(have.min(initial=n)), -1):
            if j not in have:
                after = backward[backward[:, 1] == (have[have > j].min() if (have > j).any() else have.max())].copy()
                after[:, 1] = j
                extra.append(after)
        return np.concatenate(extra)

    def schedule(self, homes: Column) -> Schedule | None:
        """Return the schedule on some devices; ``None`` if it cannot run."""
        lists = [self._tasks[homes[self._tasks[:, 1]] == device] for device in range(int(homes.max()) + 1)]
        order = np.full((len(lists), max(map(len, lists)), 3), -1, np.int32)
        for device, tasks in enumerate(lists):
            order[device, : len(tasks)] = tasks
        try:
            schedule = recorded(order, joined=self._joined)
            simulate(schedule, np.zeros((4, 1, 1)))
        except ValueError:
            return None
        return schedule


def _joined(batch: MiniBatchArrays) -> bool:
    """Return whether all forwards ended before anything else ran, as with a loss of the whole batch."""
    return bool((batch.turnaround() >= 0).all())


def _hash(codes: Column) -> Column:
    weights = np.random.default_rng(0).integers(1, 2**63, codes.shape[1], np.uint64) | np.uint64(1)
    mixed = codes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes: Column = ((mixed ^ (mixed >> np.uint64(29))) * weights).sum(axis=1, dtype=np.uint64)
    return hashes
