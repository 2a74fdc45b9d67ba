"""Plan a pipeline: simulate other balances, numbers of chunks, checkpoint modes and schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily

if TYPE_CHECKING:
    from pipesight.analysis.analyse import NoTasksError, measure
    from pipesight.analysis.measured_costs import Measured
    from pipesight.pipeline.profiled_costs import profile, with_sizes
    from pipesight.plan.plans import DoesNotFitError, Plan, best_plans, predict, simulated
    from pipesight.plan.possible_settings import settings
    from pipesight.schedule.argument_checks import SCHEDULES
    from pipesight.schedule.costs import Costs, Layer, Link
    from pipesight.schedule.memory import peak_bytes
    from pipesight.schedule.setting import Setting
    from pipesight.schedule.simulation import DeadlockError, Simulation, simulate
    from pipesight.schedule.task_orders import (
        Schedule,
        gpipe,
        interleaved,
        one_f_one_b,
        recomputed,
        recorded,
        zero_bubble,
    )

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

# Imported when used: the report needs only the simulator.
_HOMES = {
    "SCHEDULES": "pipesight.schedule.argument_checks",
    "Costs": "pipesight.schedule.costs",
    "DeadlockError": "pipesight.schedule.simulation",
    "DoesNotFitError": "pipesight.plan.plans",
    "Layer": "pipesight.schedule.costs",
    "Link": "pipesight.schedule.costs",
    "Measured": "pipesight.analysis.measured_costs",
    "NoTasksError": "pipesight.analysis.analyse",
    "Plan": "pipesight.plan.plans",
    "Schedule": "pipesight.schedule.task_orders",
    "Setting": "pipesight.schedule.setting",
    "Simulation": "pipesight.schedule.simulation",
    "best_plans": "pipesight.plan.plans",
    "gpipe": "pipesight.schedule.task_orders",
    "interleaved": "pipesight.schedule.task_orders",
    "measure": "pipesight.analysis.analyse",
    "one_f_one_b": "pipesight.schedule.task_orders",
    "peak_bytes": "pipesight.schedule.memory",
    "predict": "pipesight.plan.plans",
    "profile": "pipesight.pipeline.profiled_costs",
    "recomputed": "pipesight.schedule.task_orders",
    "recorded": "pipesight.schedule.task_orders",
    "settings": "pipesight.plan.possible_settings",
    "simulate": "pipesight.schedule.simulation",
    "simulated": "pipesight.plan.plans",
    "with_sizes": "pipesight.pipeline.profiled_costs",
    "zero_bubble": "pipesight.schedule.task_orders",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
