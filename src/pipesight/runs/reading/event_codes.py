"""The numbers for phases of tasks and kinds of spans in tables of events. Needs no NumPy: reading starts without."""

from __future__ import annotations

__all__ = ["BACKWARD", "CHECKPOINT", "COMMUNICATION", "DATA", "FORWARD", "KINDS", "OPTIMIZER", "PHASES", "RECOMPUTE"]
__all__ += ["WEIGHT"]

FORWARD, RECOMPUTE, BACKWARD, WEIGHT = range(4)
PHASES = ("forward", "recompute", "backward", "weight")
"""Phases of tasks. Schedules that split the backward have a separate phase for weight gradients."""

DATA, OPTIMIZER, CHECKPOINT, COMMUNICATION = range(4)
KINDS = ("data loading", "optimizer", "checkpoints", "communication")
"""Kinds of spans: what the main thread does outside the pipeline."""
