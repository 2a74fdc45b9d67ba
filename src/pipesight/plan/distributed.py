"""Plans for `pipesight.distributed`: what its schedules are called, and how to run a plan."""

from __future__ import annotations

from pipesight.plan.planning import Plan

__all__ = ["NAMES", "distributed_call"]

NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved-1f1b",
    "zero-bubble": "interleaved-zero-bubble",
}
"""What `DistributedPipeline` calls the schedules that plans have."""


def distributed_call(plan: Plan) -> str | None:
    """Return the code that runs a plan over as many ranks as it has partitions; ``None`` if this torch cannot."""
    from pipesight.distributed.schedules import choose, names

    setting, name = plan.setting, NAMES[plan.setting.schedule]
    if name not in names() or not choose(name).fits(setting.chunks, setting.partitions, setting.stages):
        return None
    rest = f'chunks={setting.chunks}, schedule="{name}", checkpoint="{setting.checkpoint}"'
    return f"DistributedPipeline(..., balance={list(plan.balance)}, {rest})"
