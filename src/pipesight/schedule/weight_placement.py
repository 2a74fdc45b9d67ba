"""Put weight gradients where a device would wait, as long as its memory lasts.

The other tasks of a device keep their order, so that no new order can deadlock. Whenever a device is free, it runs the
next of them if its input is there, otherwise a weight gradient that is left. Before a forward for which there is no
memory, it runs weight gradients until there is::

    before   F0 F1 B0 W0 .  . B1 W1 .  .        the device waits after W0
    after    F0 F1 B0 .  B1 W0 W1               it need not: W0 can wait
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from pipesight.schedule.task_orders import B, F, R, Schedule, W, schedule_of

__all__ = ["place_weights"]

_Task = tuple[int, int, int]


def place_weights(
    schedule: Schedule,
    seconds: Sequence[Sequence[float]],
    sizes: Sequence[float],
    limits: Sequence[float],
    *,
    delays: Sequence[float] = (),
) -> Schedule:
    """Return the schedule with its weight gradients at other places, none worse for memory than the limits.

    ``seconds`` says for each kind of task how long it takes in each stage, ``sizes`` what a micro-batch holds there
    from its forward to its weight gradient, ``delays`` how long a message from each to the next takes: by default no
    time.
    """
    return _Devices(schedule, seconds, sizes, limits, delays or [0.0] * schedule.stages).run()


class _Devices:
    """Runs all devices, each task as early as possible."""

    def __init__(
        self,
        schedule: Schedule,
        seconds: Sequence[Sequence[float]],
        sizes: Sequence[float],
        limits: Sequence[float],
        delays: Sequence[float],
    ) -> None:
        self._schedule, self._seconds, self._sizes, self._limits = schedule, seconds, sizes, limits
        self._split = schedule.split.tolist()
        # A task of the next stage on the same device needs no message.
        homes = schedule.device_of_stage
        self._delays = [late if homes[s : s + 1] != homes[s + 1 : s + 2] else 0.0 for s, late in enumerate(delays)]
        rows = [[tuple(task) for task in row.tolist() if task[0] >= 0] for row in schedule.order]
        self._order = [deque(task for task in row if task[0] != W) for row in rows]
        self._weights: list[deque[_Task]] = [deque() for _ in rows]
        self._done: list[list[_Task]] = [[] for _ in rows]
        self._end: dict[_Task, float] = {}
        self._held = [0.0] * len(rows)
        self._awaited: dict[_Task, int] = {}
        self._queue = [(0.0, device) for device in range(len(rows))]

    def run(self) -> Schedule:
        while self._queue:
            now, device = heapq.heappop(self._queue)
            self._turn(device, now)
        known = self._schedule
        return schedule_of(known.name, known.device_of_stage, known.chunks, self._done)

    def _turn(self, device: int, now: float) -> None:
        """Let a device that is free run a task, or wait for one."""
        task = self._order[device][0] if self._order[device] else None
        waiting = self._weights[device]
        ready = math.inf if task is None else self._ready(task)
        full = task is not None and task[0] == F and self._held[device] + self._sizes[task[1]] > self._limits[device]
        if task is not None and ready <= now and not (full and waiting):
            self._order[device].popleft()
            self._begin(device, task, now)
        elif waiting:
            self._begin(device, waiting.popleft(), now)
        elif task is not None and math.isinf(ready):
            needed = self._needed(task)
            assert needed is not None
            self._awaited[needed] = device
        elif task is not None:
            heapq.heappush(self._queue, (ready, device))

    def _begin(self, device: int, task: _Task, now: float) -> None:
        kind, stage, i = task
        end = self._end[task] = now + self._seconds[kind][stage]
        self._done[device].append(task)
        split = self._split[stage][i]
        if kind == F:
            self._held[device] += self._sizes[stage]
        elif kind == W or (kind == B and not split):
            self._held[device] -= self._sizes[stage]
        elif kind == B:
            self._weights[device].append((W, stage, i))
        heapq.heappush(self._queue, (end, device))
        if task in self._awaited:
            other = self._awaited.pop(task)
            heapq.heappush(self._queue, (self._ready(self._order[other][0]), other))

    def _needed(self, task: _Task) -> _Task | None:
        """Return what a task needs from another stage, or from its own forward."""
        kind, stage, i = task
        if kind == F:
            return (F, stage - 1, i) if stage else None
        if kind == R:
            return None
        return (F, stage, i) if stage == self._schedule.stages - 1 else (B, stage + 1, i)

    def _ready(self, task: _Task) -> float:
        """Return when the input of a task is there; infinite as long as that is not known."""
        needed = self._needed(task)
        if needed is None:
            return 0.0
        kind, stage = task[0], task[1]
        late = self._delays[stage - 1] if kind == F else self._delays[stage] if needed[0] == B else 0.0
        return self._end.get(needed, math.inf) + late
