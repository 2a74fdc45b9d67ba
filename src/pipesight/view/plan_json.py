"""Plans as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipesight.analysis.plan_outcome import Outcome
from pipesight.plan.plans import Plan
from pipesight.view.plan_table import notes_on

__all__ = ["plans_as_json"]


def plans_as_json(outcome: Outcome) -> dict[str, Any]:
    """Return all plans for machines. Times are in seconds, sizes in bytes."""
    found: dict[str, Any] = {"format": "pipesight-plan", "format_version": 1, "notes": notes_on(outcome, outcome.plans)}
    if (known := outcome.measured) is not None:
        found["recorded"] = {
            "schedule": known.schedule_name,
            "partitions": known.schedule.stages,
            "devices": known.schedule.devices,
            "chunks": known.schedule.chunks,
            "checkpoint": known.checkpoint,
            "balance": list(known.balance),
            "steps": known.steps,
            "step_seconds": known.step_seconds,
            "bubble": known.bubble,
            "predicted_step_seconds": known.predicted_seconds,
            "predicted_bubble": known.predicted_bubble,
            "memory_bytes": _bytes(outcome, outcome.recorded_bytes),
        }
    found["plans"] = [_plan(outcome, plan) for plan in outcome.plans]
    found["keep"] = outcome.keep() is not None
    return found


def _plan(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    return {
        "schedule": plan.schedule_name,
        "partitions": setting.partitions,
        "rounds": setting.rounds,
        "chunks": setting.chunks,
        "checkpoint": setting.checkpoint,
        "balance": list(plan.balance),
        "step_seconds": plan.step_seconds,
        "window_seconds": plan.window_seconds,
        "bubble": plan.bubble,
        "memory_bytes": _bytes(outcome, plan.memory_bytes),
        "fits": outcome.fits(plan),
        "proven": plan.proven,
        "bound_seconds": plan.bound_seconds,
        "call": outcome.call(plan),
    }


def _bytes(outcome: Outcome, needs: Sequence[float] | None) -> list[int] | None:
    if needs is None or not outcome.costs.sizes_known:
        return None
    return [math.ceil(size) for size in needs]
