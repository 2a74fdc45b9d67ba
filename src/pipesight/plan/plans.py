"""Plans: settings with their best balance, and the predicted step time, bubble and memory."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipesight._formatting import size
from pipesight.plan.balance_search import find_balance
from pipesight.schedule.costs import Costs
from pipesight.schedule.setting import Setting
from pipesight.schedule.simulation import Simulation
from pipesight.schedule.stage_costs import StageCosts
from pipesight.schedule.supported_schedules import by_name
from pipesight.schedule.task_orders import Schedule

__all__ = [
    "WORTH",
    "DoesNotFitError",
    "Plan",
    "bare_torch_call",
    "best_plans",
    "distributed_call",
    "division",
    "fastest_first",
    "predict",
    "simulated",
    "sizes_of",
]

WORTH = 0.01
"""The least share of a step that a change must save to be recommended: less is within the error of predictions."""


class DoesNotFitError(ValueError):
    """No plan keeps within the memory limit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting, a balance, and what they are predicted to give."""

    setting: Setting
    """Schedule, partitions, chunks and checkpoint mode."""
    balance: tuple[int, ...]
    """The number of layers of each stage."""
    step_seconds: float
    """From step to step, including what happens outside the pipeline."""
    window_seconds: float
    """From the first forward of a mini-batch to its last backward."""
    bubble: float
    """The share of the window in which devices are idle."""
    memory_bytes: tuple[float, ...]
    """The peak of each device: parameters and activations."""
    bound_seconds: float
    """No balance gives a shorter step than this; equal to ``step_seconds`` if that is proven to be the best."""
    order: Schedule | None = None
    """The order of tasks that a search found; by default that of the schedule."""

    @property
    def schedule(self) -> Schedule:
        """The order of tasks."""
        return self.setting.build() if self.order is None else self.order

    @property
    def schedule_name(self) -> str:
        """The name of the order: `searched`, or one of `SCHEDULES`."""
        return self.setting.schedule if self.order is None else self.order.name

    @property
    def proven(self) -> bool:
        """Whether no other balance can be faster."""
        return self.bound_seconds >= self.step_seconds

    def call(
        self,
        devices: Sequence[str] | None = None,
        units: Sequence[str] | None = None,
        *,
        in_steps: bool = False,
        file: str = "schedule.csv",
        by_file: bool = False,
    ) -> str | None:
        """Return the code that runs it in one process; ``None`` if that has no such schedule.

        Args:
            devices: Of the plan, in order.
            units: The layers, by name, of a model that `pipesight.Pipeline` runs; by default it is for `GPipe`.
            in_steps: Whether it is for the steps of a `pipesight.Pipeline`, which have schedules.
            file: Where an order that a search found is written.
            by_file: Whether any order is in the file; it is then for steps.
        """
        in_steps |= by_file
        name = self._name_in_steps(file, on_cpu=devices is None or "cpu" in devices) if in_steps else None
        name = file if by_file else name
        if name is None and (in_steps or self.schedule_name != "gpipe"):
            return None
        homes = self.schedule.device_of_stage
        where = "devices" if devices is None else json.dumps([devices[home] for home in homes])
        rest = f'devices={where}, chunks={self.setting.chunks}, checkpoint="{self.setting.checkpoint}"'
        if name is not None:
            rest += f', schedule="{name}"'
        engine = "GPipe" if units is None and not in_steps else "Pipeline"
        return f"{engine}(model, {division(self.balance, units)}, {rest})"

    def _name_in_steps(self, file: str, *, on_cpu: bool) -> str | None:
        """Return what ``Pipeline(schedule=...)`` takes; workers of the CPU have two partitions each, if several."""
        setting = self.setting
        if self.order is not None:
            return file
        several = setting.partitions > 1 and (setting.rounds == 2 or not on_cpu)
        return setting.engine_name if setting.rounds == 1 or several else None


def division(balance: Sequence[int], units: Sequence[str] | None = None) -> str:
    """Return a balance as code: ``balance=[4, 3]``, or for a model of these units ``cuts=["layers.4"]``."""
    if units is None:
        return f"balance={list(balance)}"
    starts = itertools.accumulate(balance[:-1])
    return f"cuts={json.dumps([units[start] for start in starts])}"


def sizes_of(balance: Sequence[int]) -> str:
    """Return a balance in words.

    >>> sizes_of([4]), sizes_of([4, 3, 5])
    ('4', '4, 3 and 5')
    """
    *others, last = map(str, balance)
    return f"{', '.join(others)} and {last}" if others else last


def bare_torch_call(plan: Plan, *, file: str = "schedule.csv") -> str | None:
    """Return what runs a plan in a program that uses torch's own schedules; ``None`` if torch has none for it.

    ``file`` is where an order that a search found is written.
    """
    setting = plan.setting
    name = setting.torch_name if plan.order is None else "_PipelineScheduleRuntime"
    if not name or setting.checkpoint == "except_last":
        return None
    several = plan.order is not None or setting.rounds > 1 or setting.schedule == "zero-bubble"
    call = f"{name}({'stages' if several else 'stage'}, n_microbatches={setting.chunks}, loss_fn=...)"
    if plan.order is not None:
        call += f"._load_csv({json.dumps(file)})"
    notes = [f"stages of {sizes_of(plan.balance)} layers"]
    if setting.checkpoint == "always":
        notes.append("each through torch.utils.checkpoint")
    return f"{call}  # {', '.join(notes)}"


def distributed_call(
    plan: Plan, units: Sequence[str] | None = None, *, file: str = "schedule.csv", by_file: bool = False
) -> str | None:
    """Return the code that runs a plan with one rank per partition; ``None`` if no schedule can.

    ``units`` are the layers, by name, of a model that is cut at modules. ``file`` is where an order that a search found
    is written, or any order with ``by_file``.
    """
    setting, name = plan.setting, file
    if plan.order is None and not by_file:
        name = setting.engine_name
        schedule = by_name(name)
        if schedule is None or not schedule.fits(setting.chunks, setting.partitions, setting.stages):
            return None
    rest = f'chunks={setting.chunks}, schedule="{name}", checkpoint="{setting.checkpoint}"'
    return f"DistributedPipeline(..., {division(plan.balance, units)}, {rest})"


def predict(
    costs: Costs,
    setting: Setting,
    balance: Sequence[int],
    *,
    parameter_scale: float = 2.0,
    bound: float | None = None,
    order: Schedule | None = None,
) -> Plan:
    """Predict what a setting gives with a balance of your choice.

    Example::

        plan = predict(costs, Setting("1f1b", partitions=4, chunks=16, checkpoint="never"), [3, 3, 3, 3])
        print(plan.step_seconds, plan.bubble)

    Args:
        costs: Of the layers.
        setting: Schedule, partitions, chunks and checkpoint mode.
        balance: How many layers each stage has.
        parameter_scale: Bytes held for each byte of parameters.
        bound: No balance gives a shorter mini-batch, in seconds.
        order: Another order of tasks than that of the schedule, with as many stages and micro-batches.

    Raises:
        ValueError: The balance does not fit the model or the setting.
    """
    if sum(balance) != len(costs.layers) or len(balance) != setting.stages or min(balance) < 1:
        raise ValueError(
            "balance must give each stage at least one layer, and use all layers "
            f"(balance: {list(balance)}, stages: {setting.stages}, layers: {len(costs.layers)})"
        )
    if order is not None and (order.stages, order.chunks) != (setting.stages, setting.chunks):
        raise ValueError(
            "the order must have the stages and chunks of the setting "
            f"(stages: {order.stages} and {setting.stages}, chunks: {order.chunks} and {setting.chunks})"
        )
    blocks = StageCosts(costs, setting, parameter_scale=parameter_scale, order=order)
    cut = np.concatenate([[0], np.cumsum(balance)])[:, None]
    found = blocks.simulate(cut)
    window = float(found.makespan[0]) * costs.jitter
    step = costs.minibatches * window + costs.outside
    return Plan(
        setting,
        tuple(int(count) for count in balance),
        step,
        window,
        1 - (1 - float(blocks.bubble(found)[0])) / costs.jitter,
        tuple(blocks.memory(cut)[:, 0].tolist()),
        step if bound is None else min(step, costs.minibatches * bound * costs.jitter + costs.outside),
        order,
    )


def simulated(costs: Costs, plan: Plan) -> Simulation:
    """Simulate a plan, and return when each task runs."""
    cut = np.concatenate([[0], np.cumsum(plan.balance)])[:, None]
    found = StageCosts(costs, plan.setting, order=plan.order).simulate(cut)
    times = (found.begin[..., 0], found.end[..., 0], found.makespan[0], found.busy[:, 0])
    return Simulation(found.schedule, *times)


def best_plans(
    costs: Costs, settings: Iterable[Setting], *, memory: float = math.inf, parameter_scale: float = 2.0
) -> list[Plan]:
    """Return a plan with the best balance for each setting in which the model fits, fastest first.

    Example::

        plans = best_plans(costs, settings(costs, partitions=4), memory=16 * 2**30)
        print(plans[0].call())

    Raises:
        DoesNotFitError: The model fits in no setting.
        ValueError: There are more stages than layers.
    """
    plans, least = [], math.inf
    for setting in settings:
        blocks = StageCosts(costs, setting, parameter_scale=parameter_scale)
        found = find_balance(blocks, limit=memory)
        least = min(least, found.least_bytes)
        if found.fits:
            plans.append(predict(costs, setting, found.balance, parameter_scale=parameter_scale, bound=found.bound))
    if not plans and not math.isinf(least):
        raise DoesNotFitError(
            f"no plan fits into {size(memory)} per device: the smallest needs {size(least, round_up=True)}; "
            "use more partitions, more chunks or checkpoint 'always'"
        )
    return fastest_first(plans)


def fastest_first(plans: Iterable[Plan]) -> list[Plan]:
    """Return plans sorted by step time, then by memory."""
    return sorted(plans, key=lambda plan: (round(plan.step_seconds, 9), max(plan.memory_bytes)))
