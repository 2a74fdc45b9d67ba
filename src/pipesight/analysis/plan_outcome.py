"""Plans for a recorded run or a profiled model, compared with what was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipesight.analysis.measured_costs import Measured
from pipesight.analysis.memory_limit import MemoryLimit
from pipesight.plan.large_layers import LargeLayer, large_layer
from pipesight.plan.order_search import search_orders
from pipesight.plan.plans import WORTH, Plan, bare_torch_call, best_plans, distributed_call, fastest_first
from pipesight.plan.possible_settings import settings_for_each
from pipesight.schedule.argument_checks import CHECKPOINT_MODES, SCHEDULES
from pipesight.schedule.costs import Costs
from pipesight.schedule.memory import device_bytes, peak_bytes

__all__ = ["Outcome", "make_plans"]


LESS = 0.05
"""The least share of memory that a slower plan must save to be worth listing."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Plans, the fastest first, with the costs and the run they are made from."""

    costs: Costs
    plans: Sequence[Plan]
    measured: Measured | None = None
    recorded_bytes: tuple[float, ...] | None = None
    """What the recorded schedule needs on each device."""
    devices: str | None = None
    """Their kind, such as ``cpu`` or ``cuda``."""
    memory: float = math.inf
    """Bytes that a device may hold at most, or infinity. Plans may need more than devices were seen to have."""
    file: str = "schedule.csv"
    """Where an order that a search found is written, or is to be."""

    @property
    def baseline(self) -> float | None:
        """The predicted step of the recorded schedule, which plans are compared with: both are simulated."""
        return None if self.measured is None else self.measured.predicted_seconds

    def fastest_to_run(self) -> Plan | None:
        """Return the fastest plan that the engine of the run can run: `GPipe`, the steps or calls of a `Pipeline`,
        `DistributedPipeline`, or torch's schedules."""
        able = (plan for plan in self.plans if self.call(plan) is not None)
        return next((plan for plan in able if self.fits(plan) is not False), None)

    @property
    def limit(self) -> MemoryLimit | None:
        """The memory of the devices: as given, or as recorded."""
        recorded = None if self.measured is None else self.measured.limit
        return recorded if math.isinf(self.memory) else MemoryLimit(self.memory)

    def fits(self, plan: Plan) -> bool | None:
        """Whether a plan needs no more memory than the devices have; ``None`` if that is not known."""
        if (limit := self.limit) is None or not self.costs.sizes_known:
            return None
        return limit.allows(plan.memory_bytes)

    def keep(self) -> str | None:
        """Return the advice to keep the recorded settings, or nothing if a plan that can run saves more than 1%.

        Settings with other devices than the plans have, or that need more memory, cannot be kept.
        """
        known, best = self.measured, self.fastest_to_run()
        same = known is not None and any(plan.setting.partitions == known.devices for plan in self.plans)
        if self.baseline is None or not same or max(self.recorded_bytes or (0.0,)) > self.memory:
            return None
        least = self.baseline * (1 - WORTH)
        if best is not None and best.step_seconds < least:
            return None
        which = " that the run's engine can run" if self.plans[0].step_seconds < least else ""
        return f"no plan{which} saves more than {WORTH:.0%}: keep the current settings"

    def worth_listing(self) -> list[Plan]:
        """Return the plans that are faster than all that need as little memory, or hardly more, and the fastest that
        the engine of the run can run: those that save time or, if none does, all.

        Where sizes of layers are not known, plans are compared by the share of activations that a device holds at most.
        """
        chosen, least = {id(self.fastest_to_run())}, math.inf
        for plan in fastest_first(self.plans):
            if (needs := self._needs(plan)) < least * (1 - LESS):
                chosen.add(id(plan))
                least = needs
        best = [plan for plan in self.plans if id(plan) in chosen]
        return [plan for plan in best if self.baseline is None or plan.step_seconds < self.baseline] or best

    def _needs(self, plan: Plan) -> float:
        if self.costs.sizes_known:
            return max(plan.memory_bytes)
        schedule = plan.schedule
        each = np.ones(schedule.stages)
        return float(peak_bytes(schedule, each * 0, each).max()) / (schedule.chunks * plan.setting.rounds)

    def too_large(self) -> LargeLayer | None:
        """Return the layer that is too large for any cut to help."""
        named = next((plan for plan in self.plans if plan.order is None), None)
        return None if named is None else large_layer(self.costs, named)

    def call(self, plan: Plan) -> str | None:
        """Return the code that runs a plan, where the engine of the run can."""
        units = self.costs.units
        if self.measured is not None and self.measured.facts.is_bare_torch:
            return bare_torch_call(plan, file=self.file)
        if self.measured is not None and self.measured.facts.ranks is not None:
            return distributed_call(plan, units, file=self.file)
        return plan.call(self._devices(plan), units, in_steps=self.in_steps, file=self.file)

    def calls_with_file(self, plan: Plan) -> dict[str, str]:
        """Return the code that runs the order in the file, by where: over ranks and, unless the run was, in steps."""
        units = self.costs.units
        found = {"over ranks": distributed_call(plan, units, file=self.file, by_file=True)}
        if self.measured is None or self.measured.facts.ranks is None:
            steps = plan.call(self._devices(plan), units, file=self.file, by_file=True)
            found = {"in the steps of one process": steps, **found}
        return {where: call for where, call in found.items() if call is not None}

    def _devices(self, plan: Plan) -> list[str] | None:
        if self.devices is None:
            return None
        return [
            self.devices if self.devices == "cpu" else f"{self.devices}:{j}" for j in range(plan.setting.partitions)
        ]

    @property
    def in_steps(self) -> bool:
        """Whether the run is one of the steps of a `pipesight.Pipeline`, which run most schedules."""
        return self.measured is not None and self.measured.facts.workers is not None


def make_plans(
    costs: Costs,
    measured: Measured | None,
    *,
    partitions: Sequence[int] = (),
    schedules: Sequence[str] = SCHEDULES,
    checkpoints: Sequence[str] = CHECKPOINT_MODES,
    chunks: Sequence[int] = (),
    rounds: int | None = None,
    memory: float = math.inf,
    parameter_scale: float = 2.0,
    search: bool = False,
    file: str = "schedule.csv",
) -> Outcome:
    """Find the best balance for every possible setting.

    By default, there are as many ``partitions`` as in the run, or processors if they are fewer; ``chunks`` are powers
    of two, and numbers around that of the run; ``rounds`` are as there. ``memory`` is what a device may hold, in bytes,
    ``parameter_scale`` the bytes held per byte of parameters. ``search`` looks for an order of tasks that is faster
    than those that have a name, to be written to ``file``.

    Raises:
        DoesNotFitError: No plan keeps within the memory limit.
        ValueError: No setting is possible, or neither a run nor ``partitions`` is given.
    """
    if not partitions and measured is None:
        raise ValueError("without a run, the number of partitions must be given")
    counts = [*partitions]
    if measured is not None and not counts:
        counts = [measured.devices]
        if measured.crowded and measured.processors is not None:
            counts.append(min(measured.processors, len(costs.layers)))
    possible = settings_for_each(
        costs,
        counts,
        schedules=schedules,
        checkpoints=checkpoints,
        chunks=chunks,
        recorded=None if measured is None else measured.schedule.chunks,
        rounds=rounds or (2 if measured is None else measured.rounds),
    )
    plans = best_plans(costs, possible, memory=memory, parameter_scale=parameter_scale)
    if search:
        searched = search_orders(costs, plans, memory=memory, parameter_scale=parameter_scale)
        plans = [searched, *plans] if searched.order is not None else plans
    if measured is None:
        return Outcome(costs, plans, memory=memory, file=file)
    recorded = device_bytes(measured.schedule, costs, measured.balance, parameter_scale=parameter_scale)
    kinds = {name.partition(":")[0] for name in measured.facts.devices or ()}
    kind = kinds.pop() if len(kinds) == 1 else None
    found = Outcome(costs, plans, measured, recorded, kind, memory, file)
    return replace(found, plans=sorted(plans, key=lambda plan: found.fits(plan) is False))
