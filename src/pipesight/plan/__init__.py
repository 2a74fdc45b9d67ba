"""Plan a pipeline: simulate other balances, numbers of chunks, checkpoint modes and schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily

if TYPE_CHECKING:
    from pipesight.analysis.analyse import NoTasksError, measure
    from pipesight.analysis.measured_costs import Measured
    from pipesight.pipeline.profiled_costs import profile, with_sizes
    from pipesight.plan.order_search import search_orders
    from pipesight.plan.plans import DoesNotFitError, Plan, best_plans, predict, simulated
    from pipesight.plan.possible_settings import settings
    from pipesight.plan.schedule_files import load_schedule, save_schedule
    from pipesight.schedule.argument_checks import SCHEDULES
    from pipesight.schedule.costs import Costs, Layer, Link
    from pipesight.schedule.memory import peak_bytes
    from pipesight.schedule.schedule_check import ScheduleCheck, check_schedule
    from pipesight.schedule.setting import Setting
    from pipesight.schedule.simulation import DeadlockError, Simulation, simulate
    from pipesight.schedule.task_orders import (
        Schedule,
        gpipe,
        interleaved,
        looped_bfs,
        one_f_one_b,
        recomputed,
        recorded,
        schedule_of,
        zero_bubble,
    )
    from pipesight.schedule.v_memory_orders import v_half, v_min
    from pipesight.schedule.v_orders import dualpipev, zbv
    from pipesight.view.schedule_text import draw

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
    "ScheduleCheck",
    "Setting",
    "Simulation",
    "best_plans",
    "check_schedule",
    "draw",
    "dualpipev",
    "gpipe",
    "interleaved",
    "load_schedule",
    "looped_bfs",
    "measure",
    "one_f_one_b",
    "peak_bytes",
    "predict",
    "profile",
    "recomputed",
    "recorded",
    "save_schedule",
    "schedule_of",
    "search_orders",
    "settings",
    "simulate",
    "simulated",
    "v_half",
    "v_min",
    "with_sizes",
    "zbv",
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
    "ScheduleCheck": "pipesight.schedule.schedule_check",
    "Setting": "pipesight.schedule.setting",
    "Simulation": "pipesight.schedule.simulation",
    "best_plans": "pipesight.plan.plans",
    "check_schedule": "pipesight.schedule.schedule_check",
    "draw": "pipesight.view.schedule_text",
    "dualpipev": "pipesight.schedule.v_orders",
    "gpipe": "pipesight.schedule.task_orders",
    "interleaved": "pipesight.schedule.task_orders",
    "load_schedule": "pipesight.plan.schedule_files",
    "looped_bfs": "pipesight.schedule.task_orders",
    "measure": "pipesight.analysis.analyse",
    "one_f_one_b": "pipesight.schedule.task_orders",
    "peak_bytes": "pipesight.schedule.memory",
    "predict": "pipesight.plan.plans",
    "profile": "pipesight.pipeline.profiled_costs",
    "recomputed": "pipesight.schedule.task_orders",
    "recorded": "pipesight.schedule.task_orders",
    "save_schedule": "pipesight.plan.schedule_files",
    "schedule_of": "pipesight.schedule.task_orders",
    "search_orders": "pipesight.plan.order_search",
    "settings": "pipesight.plan.possible_settings",
    "simulate": "pipesight.schedule.simulation",
    "simulated": "pipesight.plan.plans",
    "v_half": "pipesight.schedule.v_memory_orders",
    "v_min": "pipesight.schedule.v_memory_orders",
    "with_sizes": "pipesight.pipeline.profiled_costs",
    "zbv": "pipesight.schedule.v_orders",
    "zero_bubble": "pipesight.schedule.task_orders",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
