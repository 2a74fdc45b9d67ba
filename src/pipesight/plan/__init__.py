"""What would another balance, number of chunks, checkpoint mode or schedule give: simulated, not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily

if TYPE_CHECKING:
    from pipesight.plan.blocks import SCHEDULES, Setting
    from pipesight.plan.costs import Costs, Layer, Link
    from pipesight.plan.measured import Measured, NoTasksError, measure
    from pipesight.plan.memory import peak_bytes
    from pipesight.plan.planning import DoesNotFitError, Plan, best_plans, predict, settings, simulated
    from pipesight.plan.profiled import profile, with_sizes
    from pipesight.plan.schedules import Schedule, gpipe, interleaved, one_f_one_b, recomputed, recorded, zero_bubble
    from pipesight.plan.simulation import DeadlockError, Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Costs",
    "DeadlockError",
    "DoesNotFitError",
    "Layer",
    "Link",
    "Measured",
    "NoTasksError",
    "Plan",
    "Schedule",
    "Setting",
    "Simulation",
    "best_plans",
    "gpipe",
    "interleaved",
    "measure",
    "one_f_one_b",
    "peak_bytes",
    "predict",
    "profile",
    "recomputed",
    "recorded",
    "settings",
    "simulate",
    "simulated",
    "with_sizes",
    "zero_bubble",
]

# The report needs the simulator alone.
_HOMES = {
    "SCHEDULES": "pipesight.plan.blocks",
    "Costs": "pipesight.plan.costs",
    "DeadlockError": "pipesight.plan.simulation",
    "DoesNotFitError": "pipesight.plan.planning",
    "Layer": "pipesight.plan.costs",
    "Link": "pipesight.plan.costs",
    "Measured": "pipesight.plan.measured",
    "NoTasksError": "pipesight.plan.measured",
    "Plan": "pipesight.plan.planning",
    "Schedule": "pipesight.plan.schedules",
    "Setting": "pipesight.plan.blocks",
    "Simulation": "pipesight.plan.simulation",
    "best_plans": "pipesight.plan.planning",
    "gpipe": "pipesight.plan.schedules",
    "interleaved": "pipesight.plan.schedules",
    "measure": "pipesight.plan.measured",
    "one_f_one_b": "pipesight.plan.schedules",
    "peak_bytes": "pipesight.plan.memory",
    "predict": "pipesight.plan.planning",
    "profile": "pipesight.plan.profiled",
    "recomputed": "pipesight.plan.schedules",
    "recorded": "pipesight.plan.schedules",
    "settings": "pipesight.plan.planning",
    "simulate": "pipesight.plan.simulation",
    "simulated": "pipesight.plan.planning",
    "with_sizes": "pipesight.plan.profiled",
    "zero_bubble": "pipesight.plan.schedules",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
