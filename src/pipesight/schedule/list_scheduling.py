"""Make an order of tasks for given times and a limit of memory: a free device runs the best task that it can.

What is best is a `Preference`: forwards or backwards first, deep or early stages first, weight gradients when nothing
else can run, or before forwards. So that devices never wait for memory which nobody will free, a forward leaves room
for one micro-batch in each later stage of its device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipesight.schedule.task_orders import B, F, R, Schedule, W, schedule_of

__all__ = ["PREFERENCES", "Preference", "StageTimes", "list_schedule"]

_Task = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Preference:
    """Which of the tasks that a device could begin at the same time it begins."""

    backwards_first: bool
    """Before forwards."""
    deep_first: bool
    """Of several forwards, that of the later stage; of several backwards, that of the earlier one."""
    weights_first: bool
    """Before forwards, to free memory early."""


PREFERENCES = tuple(Preference(*flags) for flags in itertools.product((True, False), repeat=3))
"""All there are."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the tasks of a micro-batch take in each stage, in seconds, and hold, in bytes."""

    homes: tuple[int, ...]
    """The device of each stage."""
    forward: Sequence[float]
    """Of a forward."""
    recompute: Sequence[float]
    """Of a recomputation; it comes right before its backward."""
    backward: Sequence[float]
    """Of a backward, or of the gradient of the input."""
    weight: Sequence[float] | None
    """Of the gradients of the weights, where they are tasks of their own."""
    delays: Sequence[float]
    """From the end of a forward until the next stage has its output, and from that of a backward of that stage."""
    loss: float
    """From the last forward of a micro-batch to its first backward."""
    inputs: Sequence[float]
    """Bytes of the input, held from the forward on."""
    kept: Sequence[float]
    """Bytes of the activations, held from the forward or the recomputation on."""
    limits: Sequence[float]
    """Bytes that each device may hold."""


def list_schedule(
    times: StageTimes, chunks: int, preference: Preference, *, again: Sequence[bool], name: str = "searched"
) -> Schedule | None:
    """Return the order that comes out; ``None`` if devices would wait for memory for ever.

    ``preference`` is what a device does if it could do several things; ``again`` says for each micro-batch whether it
    is recomputed.
    """
    return _Lists(times, chunks, preference, again).run(name)


class _Lists:
    def __init__(self, times: StageTimes, chunks: int, preference: Preference, again: Sequence[bool]) -> None:
        self._times, self._chunks, self._preference, self._again = times, chunks, preference, again
        self._stages = len(times.homes)
        devices = range(max(times.homes) + 1)
        self._mine = [[s for s, home in enumerate(times.homes) if home == d] for d in devices]
        self._next = {kind: [0] * self._stages for kind in (F, B, W)}
        self._end: dict[_Task, float] = {}
        self._free, self._held = [0.0 for _ in devices], [0.0 for _ in devices]
        self._done: list[list[_Task]] = [[] for _ in devices]
        self._choice: list[tuple[float, int, int, _Task] | None] = [None for _ in devices]

    def run(self, name: str) -> Schedule | None:
        left = self._stages * self._chunks * (2 if self._times.weight is None else 3)
        for device in range(len(self._free)):
            self._look(device)
        while left:
            begins = [math.inf if choice is None else choice[0] for choice in self._choice]
            device = begins.index(min(begins))
            choice = self._choice[device]
            if choice is None:
                return None
            self._begin(device, choice[0], choice[-1])
            left -= 1
        return schedule_of(name, self._times.homes, self._chunks, self._done)

    def _look(self, device: int) -> None:
        """Find what the device begins next: what can begin first and, of that, what is preferred."""
        self._choice[device] = min(self._possible(device), default=None)

    def _possible(self, device: int) -> Iterator[tuple[float, int, int, _Task]]:
        free, prefer = self._free[device], self._preference
        for stage in self._mine[device]:
            for kind in (F, B, W) if self._times.weight is not None else (F, B):
                i = self._next[kind][stage]
                if i == self._chunks or (kind == W and i == self._next[B][stage]):
                    continue
                if math.isinf(there := self._ready(kind, stage, i)) or (kind != W and not self._fits(kind, stage, i)):
                    continue
                rank = (
                    1 if kind == F else (2 - 2 * prefer.weights_first if kind == W else 2 - 2 * prefer.backwards_first)
                )
                depth = stage if kind == B else -stage
                rank += kind == W and not prefer.weights_first
                yield max(free, there), rank, depth if prefer.deep_first else -depth, (kind, stage, i)

    def _ready(self, kind: int, stage: int, i: int) -> float:
        """Return when the input of a task is there; infinite if that is not known yet."""
        end, times = self._end, self._times
        if kind == W:
            return 0.0
        if kind == F:
            return 0.0 if stage == 0 else end.get((F, stage - 1, i), math.inf) + times.delays[stage - 1]
        if stage == self._stages - 1:
            return end.get((F, stage, i), math.inf) + times.loss
        return end.get((B, stage + 1, i), math.inf) + times.delays[stage]

    def _fits(self, kind: int, stage: int, i: int) -> bool:
        device = self._times.homes[stage]
        if kind == B:
            needs = self._times.kept[stage] if self._again[i] else 0.0
        else:
            later = [s for s in self._mine[device] if s > stage]
            needs = self._takes(stage, i) + sum(self._takes(s, i) for s in later)
            if any(self._again):
                needs += max(self._times.kept[s] for s in self._mine[device])
        return self._held[device] + needs <= self._times.limits[device]

    def _takes(self, stage: int, i: int) -> float:
        return self._times.inputs[stage] + (0.0 if self._again[i] else self._times.kept[stage])

    def _begin(self, device: int, begin: float, task: _Task) -> None:
        kind, stage, i = task
        times, end = self._times, begin
        split = times.weight is not None
        if kind == F:
            end += times.forward[stage]
            self._held[device] += self._takes(stage, i)
        elif kind == B:
            if self._again[i]:
                end += times.recompute[stage]
                self._done[device].append((R, stage, i))
                self._held[device] += times.kept[stage]
            end += times.backward[stage]
        elif times.weight is not None:
            end += times.weight[stage]
        if kind == (W if split else B):
            self._held[device] -= times.inputs[stage] + times.kept[stage]
        self._done[device].append(task)
        self._next[kind][stage] += 1
        self._free[device] = self._end[task] = end
        changed = {device}
        if kind != W:
            other = stage + 1 if kind == F else stage - 1
            changed |= {times.homes[other]} if 0 <= other < self._stages else set()
        for one in changed:
            self._look(one)
