"""``torch.distributed.pipelining``: the base of its stages, its split backward, and the files of its collectives."""

from __future__ import annotations

import torch._ops
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.c10d_logger
import torch.distributed.distributed_c10d
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = [
    "COLLECTIVE_FILES",
    "COLLECTIVE_WRAPPER_FILES",
    "STEP_FUNCTION",
    "PipelineStageBase",
    "stage_backward_input",
    "stage_backward_weight",
]

COLLECTIVE_FILES = (dist.distributed_c10d.__file__, dist._functional_collectives.__file__)
"""Where the collectives are written that a program calls: frames in them name the collective."""

COLLECTIVE_WRAPPER_FILES = (torch._ops.__file__, dist.c10d_logger.__file__)
"""Where what stands between them on a stack is written."""

STEP_FUNCTION = "_step_microbatches"
"""The function of schedules that logs a drawing of the whole schedule before it raises what a layer raised."""
