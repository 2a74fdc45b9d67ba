"""``torch.distributed.pipelining``: the base of its stages, its runtime, and the files of its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._ops
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.c10d_logger
import torch.distributed.distributed_c10d
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = [
    "COLLECTIVE_FILES",
    "COLLECTIVE_WRAPPER_FILES",
    "STEP_FUNCTION",
    "SUPPORTED",
    "PipelineStageBase",
    "check_supported",
    "runtime_of",
]

COLLECTIVE_FILES = (dist.distributed_c10d.__file__, dist._functional_collectives.__file__)
"""Where the collectives are written that a program calls: frames in them name the collective."""

COLLECTIVE_WRAPPER_FILES = (torch._ops.__file__, dist.c10d_logger.__file__)
"""Where what stands between them on a stack is written."""

SUPPORTED = hasattr(PipelineStageBase, "perform_reduce_grad")
"""Whether schedules have stages reduce the gradients of replicas: since torch 2.10. In torch 2.6 they also drop sends
that are under way, which gloo then cancels, and cannot evaluate."""

STEP_FUNCTION = "_step_microbatches"
"""The function of schedules that logs a drawing of the whole schedule before it raises what a layer raised."""


def check_supported() -> None:
    """Raise ``RuntimeError`` if this torch's schedules cannot do what ``pipesight.distributed`` asks of them."""
    if not SUPPORTED:
        raise RuntimeError(
            f"pipesight.distributed needs torch 2.10 or newer, but this is torch {torch.__version__}: "
            "upgrade torch, or train in one process with pipesight.GPipe"
        )


class _GradientReceives(dict[tuple[int, int], Any]):
    """The receives of gradients, by stage and micro-batch: it recomputes before a schedule takes one to wait for it."""

    def __init__(self, stages: dict[int, Any]) -> None:
        self._stages = stages

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        stage, i = key
        self._stages[stage].recompute(i)
        return super().pop(key, *default)


def runtime_of(rows: Sequence[Sequence[str]], stages: Sequence[Any], microbatches: int, **settings: Any) -> Any:
    """Return the schedule that runs an order of tasks, to which torch adds sends and receives.

    Args:
        rows: The tasks of each rank, such as ``2F0``.
        stages: Those of this rank; they have a method that recomputes a micro-batch.
        microbatches: How many there are.
        **settings: Of the schedule.
    """
    schedule = _PipelineScheduleRuntime(list(stages), microbatches, **settings)
    schedule.bwd_recv_ops = _GradientReceives({stage.stage_index: stage for stage in stages})
    schedule.pipeline_order = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule
