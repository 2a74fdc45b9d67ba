"""When each task of a schedule would run, given how long each takes.

All devices are advanced at once, and all steps of a batch with them::

    device 0   F0 F1 F2|F3 ...      a pointer per device, at the first task that has not run;
    device 1   F0 F1|F2 ...         those whose input has arrived run, and their pointers advance;
    device 2   F0|F1 ...            each of these fronts is a few operations on arrays

Which tasks make up a front follows from the order alone, so one walk does for any number of steps. Where devices slow
each other down, it does not: `pipesight.schedule.contended_simulation` then advances from event to event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesight.schedule.contended_simulation import simulate_contended
from pipesight.schedule.contention import rate_of
from pipesight.schedule.task_orders import KINDS, B, F, R, Schedule

__all__ = ["DeadlockError", "Simulation", "Times", "simulate"]

AT_ONCE = 2**20
"""Up to so many tasks, what each waits for is looked up at once: faster, but it takes memory."""

Times: TypeAlias = NDArray[np.float64]
_Numbers: TypeAlias = NDArray[np.int32]


class DeadlockError(ValueError):
    """An order cannot run: devices wait for each other, or for a task that no device has."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """When the tasks of a schedule run. Times start at 0; arrays end in the dimensions of the batch."""

    schedule: Schedule
    """The schedule that was simulated."""
    begin: Times
    """Of each kind, stage and micro-batch; NaN where there is no such task."""
    end: Times
    """When these tasks end."""
    makespan: Times
    """When the last task ends."""
    busy: Times
    """How long each device computes in total."""

    @property
    def bubble(self) -> Times:
        """The share of the makespan in which devices are idle, over all of them."""
        busy: Times = self.busy.mean(axis=0)
        return 1 - busy / self.makespan


def simulate(
    schedule: Schedule,
    durations: ArrayLike,
    *,
    delays: ArrayLike | None = None,
    gaps: ArrayLike = 0.0,
    rates: Sequence[float] = (),
) -> Simulation:
    """Run a schedule as if tasks took the given times, in any unit.

    A forward waits for that of the stage before, a backward for that of the stage after or, in the last stage, for its
    own forward; the gradients of weights wait for those of the inputs; a recomputation waits for nothing but its turn.
    If the schedule is ``joined``, recomputations and the backwards of the last stage wait for all forwards there.

    >>> float(simulate(gpipe(4, 8), np.ones((4, 4, 8))).bubble)  # 3 / 11
    0.2727272727272727

    Args:
        schedule: What runs where.
        durations: Of shape (4, stages, chunks, ...), or one that broadcasts to it: how long the tasks of each kind
            take. More dimensions are a batch: thousands of steps, each with times of its own, simulated at once.
        delays: Of shape (2, stages, chunks, ...), or one that broadcasts to it: how long it takes from the end of a
            task until its output is there, for the forward of each stage, and for its backward. The first stage's
            forwards wait for theirs from the start, the last stage's backwards from the end of the forward.
        gaps: How long a device waits before it begins a task of each kind; by default not at all.
        rates: How fast each of 1, 2, ... devices computes while that many do; by default all at full speed.

    Raises:
        DeadlockError: The order cannot run.
        ValueError: The shapes do not fit.
    """
    grid = (schedule.stages, schedule.chunks)
    lengths = _fit(durations, (len(KINDS), *grid), "durations")
    waits = None if delays is None else _fit(delays, (2, *grid), "delays")
    batch = np.broadcast_shapes(lengths.shape[3:], () if waits is None else waits.shape[3:])
    if rate_of(rates, schedule.devices) < 1:
        return _shared(schedule, lengths, waits, batch, np.broadcast_to(np.asarray(gaps, float), len(KINDS)), rates)
    each_gap = np.broadcast_to(np.asarray(gaps, float), len(KINDS))
    walk = _Walk(schedule)
    nothing = walk.count  # the number that stands for no task
    begin, end = np.full((walk.count, *batch), np.nan), np.full((walk.count + 1, *batch), np.nan)
    end[nothing] = 0.0
    free, busy = (np.zeros((schedule.devices, *batch)) for _ in range(2))
    while walk.left:
        devices, tasks, needs, (kind, stage, microbatch) = walk.front()
        took = lengths[kind, stage, microbatch]
        gap = each_gap[kind].reshape(-1, *[1] * len(batch))
        there = end[needs]
        if waits is not None:
            there += _delay(waits, kind, np.where(kind == R, schedule.stages - 1, stage), microbatch, needs == nothing)
        start = np.maximum(free[devices], there) + gap
        begin[tasks] = start
        busy[devices] += took
        start += took
        end[tasks] = free[devices] = start
        walk.advance(devices, tasks)
    shape = (len(KINDS), *grid, *batch)
    return Simulation(schedule, begin.reshape(shape), end[:-1].reshape(shape), free.max(axis=0), busy)


def _shared(
    schedule: Schedule, lengths: Times, waits: Times | None, batch: tuple[int, ...], gaps: Times, rates: Sequence[float]
) -> Simulation:
    """Simulate devices that slow each other down. A device is busy from the begin of a task to its end."""
    walk = _Walk(schedule)
    while walk.left:  # raises if the order cannot run
        devices, tasks, _, _ = walk.front()
        walk.advance(devices, tasks)
    kind, stage, i = np.maximum(schedule.order, 0).transpose(2, 0, 1)
    numbers, needs = walk.numbered(schedule.order)
    size = int(np.prod(batch, dtype=int))
    took = np.broadcast_to(lengths, (*lengths.shape[:3], *batch)).reshape(*lengths.shape[:3], size)[kind, stage, i]
    late = np.zeros_like(took)
    if waits is not None:
        all_waits = np.broadcast_to(waits, (*waits.shape[:3], *batch)).reshape(*waits.shape[:3], size)
        of_stage = np.where(kind == R, schedule.stages - 1, stage)
        late = _delay(all_waits, kind, of_stage, i, needs == walk.count)
    begin, end, makespan = simulate_contended(numbers, needs, took, late, gaps[kind], walk.count, rates)
    busy = np.nansum((end - begin)[numbers] * (schedule.order[..., 0] >= 0)[..., None], axis=1)
    shape = (len(KINDS), schedule.stages, schedule.chunks, *batch)
    begin, end = begin[: walk.count].reshape(shape), end[: walk.count].reshape(shape)
    return Simulation(schedule, begin, end, makespan.reshape(batch), busy.reshape(schedule.devices, *batch))


def _fit(times: ArrayLike, shape: tuple[int, int, int], what: str) -> Times:
    """Broadcast the first dimensions to those of the tasks, without copying."""
    array = np.asarray(times, float)
    try:
        return np.broadcast_to(array, (*shape, *array.shape[3:]))
    except ValueError:
        raise ValueError(
            f"{what} must have the shape {shape}, or one more with a batch (shape: {array.shape})"
        ) from None


def _delay(waits: Times, kind: _Numbers, stage: _Numbers, i: _Numbers, needless: NDArray[np.bool_]) -> Times:
    found: Times = waits[(kind != F).astype(int), stage, i]
    alone = ((kind == R) & needless) | (kind > B)  # recomputations that wait for nothing, and weights
    if alone.any():
        found[alone] = 0.0
    return found


class _Walk:
    """A pointer per device, and what the task at each waits for. Tasks have numbers."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._size = schedule.stages * schedule.chunks
        self.count = len(KINDS) * self._size
        self.left = schedule.tasks
        self._order = schedule.order.reshape(-1, 3)
        self._length = schedule.order.shape[1]
        self._first = np.arange(schedule.devices) * self._length
        self._places = self._first.copy()
        self._done = np.zeros(self.count + 2, bool)
        self._done[self.count] = True  # what waits for nothing waits for this; nothing, for the one after it
        self._heads = np.zeros((schedule.devices, 3), np.int32)
        self._numbers = np.zeros(schedule.devices, np.int64)
        self._needs = np.zeros(schedule.devices, np.int64)
        self._join = self._last_forward() if schedule.joined else self.count
        self._all = self.numbered(self._order) if len(self._order) <= AT_ONCE else None
        self._look(np.arange(schedule.devices))

    def front(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Return the devices that can proceed, the numbers of their tasks and of what those need, and the tasks."""
        devices = np.flatnonzero(self._done[self._needs])
        if not len(devices):
            raise DeadlockError(self._complaint())
        return devices, self._numbers[devices], self._needs[devices], self._heads[devices].T

    def advance(self, devices: NDArray[np.int64], tasks: NDArray[np.int64]) -> None:
        """Mark tasks as done, and advance the pointers of their devices."""
        self._done[tasks] = True
        self.left -= len(tasks)
        self._places[devices] += 1
        self._look(devices)

    def _look(self, devices: NDArray[np.int64]) -> None:
        """Look up what the devices run next, and what that waits for."""
        places = self._places[devices]
        over = places - self._first[devices] >= self._length
        at = np.minimum(places, len(self._order) - 1)
        heads = self._order[at]
        if self._all is None:
            number, needs = self.numbered(heads)
        else:
            number, needs = self._all[0][at], self._all[1][at]
        needs[over] = self.count + 1
        self._heads[devices], self._numbers[devices], self._needs[devices] = heads, number, needs

    def numbered(self, tasks: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of tasks, and of what they wait for; padding gets the number after the last."""
        kind, stage, i = np.moveaxis(tasks.astype(np.int64), -1, 0)
        last = self._schedule.stages - 1
        chunks, size = self._schedule.chunks, self._size
        number = (kind * last + kind + stage) * chunks + i
        needs = number - np.array([chunks, 0, -chunks, size])[kind]
        needs[(kind == F) & (stage == 0)] = self.count
        needs[kind == R] = self._join
        lasts = (kind == B) & (stage == last)
        if self._schedule.joined:
            needs[lasts] = self._join
        else:
            needs[lasts] = number[lasts] - B * size
        needs[kind < 0] = self.count + 1
        return np.where(kind < 0, self.count + 1, number), needs

    def _last_forward(self) -> int:
        """Return the number of the forward that the last stage runs last: when it ends, all have."""
        order, last = self._schedule.order, self._schedule.stages - 1
        row = order[self._schedule.device_of_stage[last]]
        forwards = row[(row[:, 0] == F) & (row[:, 1] == last)]
        return last * self._schedule.chunks + int(forwards[-1, 2]) if len(forwards) else self.count

    def _complaint(self) -> str:
        stuck = np.flatnonzero(self._needs <= self.count)
        waits = [
            f"device {device} waits with {self._name(self._numbers[device])} for {self._name(self._needs[device])}"
            for device in stuck[:4]
        ]
        more = [] if len(stuck) <= 4 else [f"and {len(stuck) - 4} more"]
        return f"the devices of {self._schedule.name!r} wait for each other: {'; '.join(waits + more)}"

    def _name(self, number: int) -> str:
        kind, rest = divmod(int(number), self._size)
        stage, i = divmod(rest, self._schedule.chunks)
        missing = ((self._schedule.order == (kind, stage, i)).all(-1)).sum() == 0
        return f"{KINDS[kind]}{i} of stage {stage}" + (", which no device runs" if missing else "")
