"""The schedules that the installed torch can run, and torch's objects for them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
import torch.distributed.pipelining.schedules as torch_schedules

from pipesight._torch.pipelining import STEP_FUNCTION
from pipesight.schedule.supported_schedules import SCHEDULES, RankSchedule, by_name

__all__ = ["choose", "make", "names"]


def _there() -> list[RankSchedule]:
    return [kind for kind in SCHEDULES if hasattr(pipelining.schedules, kind.torch_name)]


def names() -> list[str]:
    """Return the names of the schedules that this torch has."""
    return [kind.name for kind in _there()]


def choose(name: str) -> RankSchedule:
    """Return the schedule of that name; case, dashes and underscores do not matter.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    if (kind := by_name(name, _there())) is not None:
        return kind
    listed = ", ".join(repr(known) for known in names())
    raise ValueError(f"schedule {name!r} is not one of those that torch {torch.__version__} has: {listed}")


def make(kind: RankSchedule, stages: Sequence[Any], microbatches: int, loss_fn: Callable[..., Any]) -> Any:
    """Return torch's schedule over this rank's stages."""
    _silence()
    schedule = getattr(pipelining.schedules, kind.torch_name)
    # The loss says itself what each micro-batch weighs.
    settings = {"loss_fn": loss_fn, "scale_grads": False}
    if "scale_grads" not in inspect.signature(schedule).parameters:  # before torch 2.7 it never scaled
        del settings["scale_grads"]
    return schedule(stages[0] if kind.placement == "one each" else list(stages), microbatches, **settings)


class _NoTables(logging.Filter):
    """Drops the drawing of the whole schedule that torch logs before it raises what a layer raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.levelno == logging.ERROR and record.funcName == STEP_FUNCTION)


_NO_TABLES = _NoTables()


def _silence() -> None:
    torch_schedules.logger.addFilter(_NO_TABLES)  # once, however often it is added
