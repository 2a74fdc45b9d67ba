"""Is this forward a recomputation? Then its tensors have been measured already.

GPipe says so itself. ``torch.utils.checkpoint`` does not, but runs both forwards: its frames are on the stack::

    backward() > engine > checkpoint.py > layer          recomputed: the engine is further out
    layer > checkpoint.py > layer                        the first time
    backward() > engine > checkpoint.py > backward() > engine > hook      a gradient, inside of a checkpoint

A worker of a pipeline has a stack of its own. It is told whether a backward called the pipeline.
"""

from __future__ import annotations

import sys

import torch.autograd.graph
import torch.utils.checkpoint

from pipesight import context
from pipesight._torch.autograd import in_backward
from pipesight.pipeline.caller_state import began_in_backward

__all__ = ["in_checkpoint", "is_recomputing"]

CHECKPOINT = torch.utils.checkpoint.__file__
ENGINE = torch.autograd.graph.__file__


def is_recomputing() -> bool:
    """Whether a checkpointed forward runs for the second time, in GPipe or in ``torch.utils.checkpoint``."""
    where = context.current()
    if where is not None and (where.phase == "recompute" or (where.phase == "forward" and began_in_backward())):
        return True
    return in_backward() and in_checkpoint()


def in_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` called this code, with no backward in between."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == CHECKPOINT:
            return True
        if file == ENGINE:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
