"""The numbers for phases of tasks and kinds of spans in tables of events. Needs no NumPy: reading starts without."""

from __future__ import annotations

__all__ = ["BACKWARD", "CHECKPOINT", "COMMUNICATION", "DATA", "FORWARD", "KINDS", "OPTIMIZER", "PHASES", "PROGRAM"]
__all__ += ["COMMUNICATING_KERNEL", "COMPUTE", "EVALUATION", "MEMORY", "MESSAGE", "RECOMPUTE", "WEIGHT"]

FORWARD, RECOMPUTE, BACKWARD, WEIGHT = range(4)
PHASES = ("forward", "recompute", "backward", "weight")
"""Phases of tasks. Schedules that split the backward have a separate phase for weight gradients."""

DATA, OPTIMIZER, CHECKPOINT, COMMUNICATION, PROGRAM, EVALUATION = range(6)
KINDS = ("data loading", "optimizer", "checkpoints", "communication", "program", "evaluation")
"""Kinds of spans: what the main thread does outside the pipeline. Of kind `PROGRAM` are the user's own spans and calls
of modules that no pipeline makes; calls without gradients are of kind `EVALUATION`."""

COMPUTE, MESSAGE, MEMORY = range(3)
COMMUNICATING_KERNEL = "nccl|rccl"
"""What the name of a kernel that communicates matches."""
"""Kinds of what runs on a GPU: kernels that compute, kernels that communicate, and copies and fills."""
