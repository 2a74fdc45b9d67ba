"""What would another balance, number of chunks, checkpoint mode or schedule give: simulated, not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily

if TYPE_CHECKING:
    from pipesight.analysis.measured_costs import Measured, NoTasksError, measure
    from pipesight.pipeline.profiled_costs import profile, with_sizes
    from pipesight.plan.planning import DoesNotFitError, Plan, best_plans, predict, settings, simulated
    from pipesight.schedule.costs import Costs, Layer, Link
    from pipesight.schedule.cuts import SCHEDULES, Setting
    from pipesight.schedule.memory import peak_bytes
    from pipesight.schedule.orders import Schedule, gpipe, interleaved, one_f_one_b, recomputed, recorded, zero_bubble
    from pipesight.schedule.simulation import DeadlockError, Simulation, simulate

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
    "SCHEDULES": "pipesight.schedule.cuts",
    "Costs": "pipesight.schedule.costs",
    "DeadlockError": "pipesight.schedule.simulation",
    "DoesNotFitError": "pipesight.plan.planning",
    "Layer": "pipesight.schedule.costs",
    "Link": "pipesight.schedule.costs",
    "Measured": "pipesight.analysis.measured_costs",
    "NoTasksError": "pipesight.analysis.measured_costs",
    "Plan": "pipesight.plan.planning",
    "Schedule": "pipesight.schedule.orders",
    "Setting": "pipesight.schedule.cuts",
    "Simulation": "pipesight.schedule.simulation",
    "best_plans": "pipesight.plan.planning",
    "gpipe": "pipesight.schedule.orders",
    "interleaved": "pipesight.schedule.orders",
    "measure": "pipesight.analysis.measured_costs",
    "one_f_one_b": "pipesight.schedule.orders",
    "peak_bytes": "pipesight.schedule.memory",
    "predict": "pipesight.plan.planning",
    "profile": "pipesight.pipeline.profiled_costs",
    "recomputed": "pipesight.schedule.orders",
    "recorded": "pipesight.schedule.orders",
    "settings": "pipesight.plan.planning",
    "simulate": "pipesight.schedule.simulation",
    "simulated": "pipesight.plan.planning",
    "with_sizes": "pipesight.pipeline.profiled_costs",
    "zero_bubble": "pipesight.schedule.orders",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
