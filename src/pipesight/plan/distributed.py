"""Plans for `pipesight.distributed`: what its schedules are called, and which of them can run a plan."""

from __future__ import annotations

from pipesight.plan.blocks import Setting
from pipesight.plan.planning import Plan

__all__ = ["NAMES", "distributed_call", "runs"]

NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved-1f1b",
    "zero-bubble": "interleaved-zero-bubble",
}
"""What `DistributedPipeline` calls the schedules that plans have."""


def runs(setting: Setting) -> bool:
    """Tell whether `DistributedPipeline` takes a setting, of a torch that has the schedule; this needs no torch."""
    if setting.schedule == "1f1b":
        return setting.chunks >= setting.partitions
    return setting.schedule == "gpipe" or setting.chunks % max(1, setting.chunks // setting.partitions) == 0


def distributed_call(plan: Plan) -> str | None:
    """Return the code that runs a plan over as many ranks as it has partitions; ``None`` if this torch cannot."""
    from pipesight.distributed.schedules import choose, names

    setting, name = plan.setting, NAMES[plan.setting.schedule]
    if name not in names() or not choose(name).fits(setting.chunks, setting.partitions, setting.stages):
        return None
    rest = f'chunks={setting.chunks}, schedule="{name}", checkpoint="{setting.checkpoint}"'
    return f"DistributedPipeline(..., balance={list(plan.balance)}, {rest})"
