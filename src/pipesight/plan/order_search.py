"""Search for an order of tasks that is faster than those that have a name, under a limit of memory.

The best plans of each placement of stages are where it starts: it keeps their balance, chunks and checkpoint mode, and
never returns anything slower. For each, it makes orders by list scheduling, moves weight gradients to where devices
wait, and then swaps neighbouring tasks on the critical path as long as that helps::

    device 0   F0 F1 F2 |B0| F3      the critical path goes back from the last task, each time to what ended last: the
    device 1      F0 B0 ^   B1       task before it on the device, or its input. Swapping two tasks next to each other
                                     on it is all that can help at once.

This finds no optimum, and proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pipesight.plan.plans import Plan, fastest_first, predict
from pipesight.schedule.costs import Costs
from pipesight.schedule.list_scheduling import PREFERENCES, StageTimes, list_schedule
from pipesight.schedule.simulation import DeadlockError, Simulation
from pipesight.schedule.stage_costs import Cuts, StageCosts
from pipesight.schedule.task_orders import B, F, R, Schedule, W, recomputed
from pipesight.schedule.weight_placement import place_weights

__all__ = ["search_orders"]

_Task: TypeAlias = tuple[int, ...]

STARTS = 6
"""How many plans the search starts from."""
SWAPPED = 2
"""For how many of them tasks are swapped."""
SIMULATED = 50_000
"""How many tasks are simulated at most, over all swaps of one."""
SAME = 1e-9


def search_orders(
    costs: Costs, plans: Sequence[Plan], *, memory: float = math.inf, parameter_scale: float = 2.0, split: bool = True
) -> Plan:
    """Return the fastest plan that is found; of those given, if no other order is faster.

    Example::

        plans = best_plans(costs, settings(costs, partitions=4), memory=16 * 2**30)
        plan = search_orders(costs, plans, memory=16 * 2**30)
        save_schedule(plan.schedule, "schedule.csv")

    Args:
        costs: Of the layers.
        plans: That fit, such as `best_plans` returns.
        memory: Bytes that a device may hold.
        parameter_scale: Bytes held per byte of parameters.
        split: Whether weight gradients may be tasks of their own.

    Raises:
        ValueError: There are no plans.
    """
    if not plans:
        raise ValueError("a search needs plans to start from (plans: 0)")
    known = fastest_first(plan for plan in plans if plan.order is None)
    searches = [_Search(costs, plan, memory, parameter_scale, split) for plan in _starts(known)]
    searches.sort(key=lambda search: search.seconds)
    for search in searches[:SWAPPED]:
        search.swap()
    return fastest_first([*plans, *(search.plan() for search in searches)])[0]


def _starts(plans: Sequence[Plan]) -> list[Plan]:
    """Return the fastest plan of each placement of stages and checkpoint mode; a single micro-batch has one order."""
    best: dict[tuple[object, ...], Plan] = {}
    for plan in plans:
        setting = plan.setting
        if setting.chunks > 1 and setting.partitions > 1:
            best.setdefault((setting.in_v, setting.partitions, setting.rounds, setting.checkpoint), plan)
    return list(best.values())[:STARTS]


@dataclass(frozen=True, slots=True)
class _Tried:
    order: Schedule
    found: Simulation
    seconds: float


class _Search:
    """Looks for orders with the balance of a plan."""

    def __init__(self, costs: Costs, plan: Plan, memory: float, parameter_scale: float, split: bool) -> None:
        self._costs, self._plan, self._memory, self._scale = costs, plan, memory, parameter_scale
        self._cut: Cuts = np.concatenate([[0], np.cumsum(plan.balance)])[:, None]
        self._splits = (False, True) if split else (False,)
        start = self._try(plan.schedule)
        assert start is not None  # plans fit
        self._start = self._best = start
        for order in self._made():
            tried = self._try(order)
            if tried is not None and tried.seconds < self._best.seconds * (1 - SAME):
                self._best = tried

    @property
    def seconds(self) -> float:
        """How long a step takes in the best order so far."""
        return self._costs.minibatches * self._best.seconds * self._costs.jitter

    def plan(self) -> Plan:
        """Return the best order so far as a plan."""
        if self._best is self._start:
            return self._plan
        plan, best = self._plan, self._best.order
        order = Schedule("searched", best.stages, best.chunks, best.device_of_stage, best.order)
        return predict(self._costs, plan.setting, plan.balance, parameter_scale=self._scale, order=order)

    def _try(self, order: Schedule) -> _Tried | None:
        """Simulate an order; nothing if it cannot run, or does not fit."""
        blocks = StageCosts(self._costs, self._plan.setting, parameter_scale=self._scale, order=order)
        if not math.isinf(self._memory) and blocks.memory(self._cut).max() > self._memory:
            return None
        try:
            found = blocks.simulate(self._cut)
        except DeadlockError:
            return None
        return _Tried(order, found, float(found.makespan[0]))

    def _made(self) -> Iterator[Schedule]:
        """Yield orders made by list scheduling, and with other places for weight gradients."""
        setting, plan = self._plan.setting, self._plan
        again = recomputed(setting.checkpoint, setting.chunks)
        for split in self._splits:
            times = self._times(plan.schedule, split)
            for preference in PREFERENCES[:: 1 if split else 2]:  # two differ in weight gradients alone
                order = list_schedule(times, setting.chunks, preference, again=again)
                if order is None:
                    continue
                yield order
                if split:
                    yield self._placed(order, times)
        if plan.schedule.split.any():
            yield self._placed(plan.schedule, self._times(plan.schedule, True))

    def _placed(self, order: Schedule, times: StageTimes) -> Schedule:
        seconds = [times.forward, times.recompute, times.backward, times.weight or times.backward]
        sizes = [a + b for a, b in zip(times.inputs, times.kept, strict=True)]
        return place_weights(order, seconds, sizes, times.limits, delays=times.delays)

    def _times(self, order: Schedule, split: bool) -> StageTimes:
        """Return what tasks take in each stage, if backwards are split or not."""
        costs, setting = self._costs, self._plan.setting
        blocks = StageCosts(costs, setting, parameter_scale=self._scale, order=order)
        begin, end = self._cut[:-1, 0], self._cut[1:, 0]
        forward, again, _, _ = blocks.time[:, begin, end]
        backward, weight = blocks.in_parts[:, begin, end]
        homes = np.asarray(order.device_of_stage)
        apart = np.append(homes[1:] != homes[:-1], False)
        parameters = np.zeros(order.devices)
        np.add.at(parameters, homes, (blocks.bytes.fixed + blocks.bytes.gradients)[begin, end])
        return StageTimes(
            order.device_of_stage,
            forward.tolist(),
            again.tolist(),
            (backward if split else blocks.whole[begin, end]).tolist(),
            weight.tolist() if split else None,
            (blocks.send[end] * apart).tolist(),
            costs.loss / setting.chunks,
            blocks.bytes.inputs[begin, end].tolist(),
            blocks.bytes.activations[begin, end].tolist(),
            (self._memory - parameters - costs.other_bytes).tolist(),
        )

    def swap(self) -> None:
        """Swap neighbours on the critical path as long as that helps, and there is time."""
        left = SIMULATED // self._best.order.tasks
        improved = True
        while improved:
            improved = False
            for device, place in _critical_pairs(self._best):
                left -= 1
                if left < 0:
                    return
                known = self._best.order
                tasks = known.order.copy()
                tasks[device, [place, place + 1]] = tasks[device, [place + 1, place]]
                try:
                    order = Schedule(known.name, known.stages, known.chunks, known.device_of_stage, tasks)
                except ValueError:  # one needs the other
                    continue
                tried = self._try(order)
                if tried is not None and tried.seconds < self._best.seconds * (1 - SAME):
                    self._best, improved = tried, True
                    break


def _critical_pairs(tried: _Tried) -> list[tuple[int, int]]:
    """Return the pairs of neighbours on the critical path, by device and place, from the end to the begin."""
    order, begin, end = tried.order, tried.found.begin[..., 0], tried.found.end[..., 0]
    rows = order.order.tolist()
    places = {tuple(task): (d, k) for d, row in enumerate(rows) for k, task in enumerate(row) if task[0] >= 0}
    task = max(places, key=lambda one: float(end[one]))
    pairs: list[tuple[int, int]] = []
    while True:
        device, place = places[task]
        before = tuple(rows[device][place - 1]) if place else None
        needed = _needed(task, order.stages, places)
        times = [-math.inf if one is None else float(end[one]) for one in (before, needed)]
        if before is None and needed is None:
            return pairs
        if before is not None:
            pairs.append((device, place - 1))
        last = before if times[0] >= times[1] else needed
        assert last is not None
        task = last
        if float(begin[task]) <= 0:
            return pairs


def _needed(task: _Task, stages: int, there: dict[_Task, tuple[int, int]]) -> _Task | None:
    kind, stage, i = task
    needs = {
        F: (F, stage - 1, i),
        R: None,
        B: (B, stage + 1, i) if stage + 1 < stages else (F, stage, i),
        W: (B, stage, i),
    }[kind]
    return needs if needs in there else None
