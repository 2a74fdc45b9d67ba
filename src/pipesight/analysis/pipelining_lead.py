"""What a pipeline would give a program that has none: where its model can be cut, and what the planner predicts.

The costs are those of the modules as they were recorded, on one device. How much less time a micro-batch takes than the
whole batch is not known: it is assumed to be in proportion, and transfers to take no time, so the gain is a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesight.analysis.module_times import ModuleTime
from pipesight.analysis.program_advice import facts_about
from pipesight.analysis.program_report import ProgramReport
from pipesight.plan.plans import best_plans
from pipesight.schedule.costs import Costs, Layer
from pipesight.schedule.setting import Setting

__all__ = ["PipeliningLead", "pipelining_lead"]

PARTITIONS = 4
"""How many are tried; fewer, if the model has fewer modules to cut at."""
MOST_CHUNKS = 16
"""At most so many micro-batches."""


@dataclass(frozen=True, slots=True)
class PipeliningLead:
    """A plan for a program's model, or why there is none."""

    model: str
    """The class of the model."""
    refusal: str | None = None
    """Why no plan is possible, if so; then nothing below is known."""
    units: tuple[str, ...] = ()
    """The modules at which it can be cut, by name."""
    cuts: tuple[str, ...] = ()
    """Those that begin partitions 1, 2 and so on."""
    chunks: int = 0
    """Micro-batches of a mini-batch."""
    step: float = 0.0
    """The predicted step, in microseconds: no step is shorter."""
    recorded: float = 0.0
    """The mean step that was recorded, in microseconds."""
    bubble: float = 0.0
    """The predicted bubble."""
    parameter_bytes: tuple[int, ...] = ()
    """Of each partition; gradients take as much again."""

    @property
    def partitions(self) -> int:
        """How many partitions the plan has."""
        return len(self.parameter_bytes)


def pipelining_lead(program: ProgramReport, description: Mapping[str, Any]) -> PipeliningLead | None:
    """Return what a pipeline would give; ``None`` if there is no model to train, or it is spread over ranks."""
    models = facts_about(description, "models")
    if not program.trains or not models or program.ranks > 1:
        return None
    model = max(models, key=lambda entry: int(entry.get("parameter_bytes") or 0))
    name = str(model.get("class"))
    units = [unit for unit in model.get("units") or () if isinstance(unit, dict)]
    if not units:
        return PipeliningLead(name, "no modules were seen in it: it is a single one, or compiled")
    if sum(str(entry.get("class")) == name for entry in models) > 1:
        return PipeliningLead(name, "several models of this class train, whose modules have the same names")
    times = {module.name: module for module in program.modules.modules if module.model == name}
    if (why := _refusal(units, times)) is not None:
        return PipeliningLead(name, why)
    partitions = min(PARTITIONS, len(units))
    return _plan(name, units, times, program, partitions)


def _refusal(units: Sequence[Mapping[str, Any]], times: Mapping[str, ModuleTime]) -> str | None:
    again = [str(unit["name"]) for unit in units if unit.get("calls") != 1]
    if again:
        return f"a module is called more than once in a step: {again[0]}"
    if len(units) < 2:
        return "it has a single module"
    missing = [str(unit["name"]) for unit in units if str(unit["name"]) not in times]
    if missing:
        return (
            f"no step with the times of all modules was recorded ({missing[0]} is missing); at least 5 steps are needed"
        )
    if not any(times[str(unit["name"])].whole_backward for unit in units):
        return "backwards were not recorded by module, as those on a GPU are not; use pipesight plan --model"
    return None


def _plan(
    name: str,
    units: Sequence[Mapping[str, Any]],
    times: Mapping[str, ModuleTime],
    program: ProgramReport,
    partitions: int,
) -> PipeliningLead:
    recorded = sum(program.parts.values())
    # Steps that show every module take longer; what matters is how the time is shared out.
    inside = sum(times[str(unit["name"])].whole_forward + times[str(unit["name"])].whole_backward for unit in units)
    computed = program.parts.get("forward", 0.0) + program.parts.get("backward", 0.0)
    scale = min(1.0, computed / max(inside, 1e-9)) * 1e-6
    layers = tuple(
        Layer(
            str(unit["name"]),
            forward=times[str(unit["name"])].whole_forward * scale,
            backward=times[str(unit["name"])].whole_backward * scale,
            output_bytes=float(unit.get("output_bytes") or 0),
            parameter_bytes=float(unit.get("parameter_bytes") or 0),
        )
        for unit in units
    )
    in_layers = sum(layer.forward + layer.backward for layer in layers)
    samples = program.steps.samples[program.counted]
    known = samples[samples > 0]
    batch = int(np.median(known)) if len(known) else MOST_CHUNKS
    costs = Costs(layers, outside=max(recorded * 1e-6 - in_layers, 0.0), by_cuts=True)
    chunks = [count for count in (2, 4, 8, 16) if count <= min(batch, MOST_CHUNKS)] or [1]
    plans = best_plans(costs, [Setting("gpipe", partitions, count, checkpoint="never") for count in chunks])
    plan = plans[0]
    ends = np.cumsum(plan.balance)
    sizes = np.cumsum([0, *(layer.parameter_bytes for layer in layers)])
    starts = ends[:-1].tolist()
    return PipeliningLead(
        model=name,
        units=tuple(layer.name for layer in layers),
        cuts=tuple(layers[start].name for start in starts),
        chunks=plan.setting.chunks,
        step=plan.step_seconds * 1e6,
        recorded=recorded,
        bubble=plan.bubble,
        parameter_bytes=tuple(int(sizes[b] - sizes[a]) for a, b in zip([0, *starts], ends.tolist(), strict=True)),
    )
