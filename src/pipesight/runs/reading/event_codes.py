"""What the numbers in tables mean: phases of tasks, and kinds of spans. Those who only read need no arrays for it."""

from __future__ import annotations

__all__ = ["BACKWARD", "CHECKPOINT", "COMMUNICATION", "DATA", "FORWARD", "KINDS", "OPTIMIZER", "PHASES", "RECOMPUTE"]
__all__ += ["WEIGHT"]

FORWARD, RECOMPUTE, BACKWARD, WEIGHT = range(4)
PHASES = ("forward", "recompute", "backward", "weight")
"""Of tasks. Schedules that split the backward have the gradients of weights by themselves."""

DATA, OPTIMIZER, CHECKPOINT, COMMUNICATION = range(4)
KINDS = ("data loading", "optimizer", "checkpoints", "communication")
"""Of what the program does beside its pipelines."""
