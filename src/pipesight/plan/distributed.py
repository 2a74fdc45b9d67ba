"""Plans for `pipesight.distributed`: what its schedules are called, and how to run a plan."""

from __future__ import annotations

from pipesight.plan.plans import Plan
from pipesight.schedule.rank_schedules import by_name

__all__ = ["NAMES", "distributed_call"]

NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved-1f1b",
    "zero-bubble": "interleaved-zero-bubble",
}
"""What `DistributedPipeline` calls the schedules that plans have. Every torch that pipesight supports has these."""


def distributed_call(plan: Plan) -> str | None:
    """Return the code that runs a plan over as many ranks as it has partitions; ``None`` if no schedule can."""
    setting, name = plan.setting, NAMES[plan.setting.schedule]
    schedule = by_name(name)
    if schedule is None or not schedule.fits(setting.chunks, setting.partitions, setting.stages):
        return None
    rest = f'chunks={setting.chunks}, schedule="{name}", checkpoint="{setting.checkpoint}"'
    return f"DistributedPipeline(..., balance={list(plan.balance)}, {rest})"
