"""The schedules that the installed torch can run, orders of one's own, and torch's objects for them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
import torch.distributed.pipelining.schedules as torch_schedules

from pipesight._torch.pipelining import STEP_FUNCTION, runtime_of
from pipesight.plan.schedule_files import load_schedule
from pipesight.schedule.csv_format import schedule_to_csv
from pipesight.schedule.schedule_check import check_schedule
from pipesight.schedule.supported_schedules import SCHEDULES, RankSchedule, by_name, of_order
from pipesight.schedule.task_orders import Schedule

__all__ = ["choose", "make", "names"]


def _there() -> list[RankSchedule]:
    return [kind for kind in SCHEDULES if not kind.torch_name or hasattr(pipelining.schedules, kind.torch_name)]


def names() -> list[str]:
    """Return the names of the schedules that this torch has."""
    return [kind.name for kind in _there()]


def choose(schedule: str | PathLike[str] | Schedule) -> RankSchedule:
    """Return the schedule of a name, whose case, dashes and underscores do not matter, of a CSV file, or of an order.

    Raises:
        OSError: The file cannot be read.
        ValueError: There is no such schedule, and the message lists those there are; or the order cannot run.
    """
    if isinstance(schedule, Schedule):
        check_schedule(schedule).raise_problems()
        return of_order(schedule)
    if isinstance(schedule, PathLike) or str(schedule).endswith(".csv"):
        return of_order(load_schedule(schedule))
    if (kind := by_name(schedule, _there())) is not None:
        return kind
    listed = ", ".join(repr(known) for known in names())
    raise ValueError(
        f"schedule {schedule!r} is neither a .csv file nor one of those that torch {torch.__version__} has: {listed}"
    )


def make(kind: RankSchedule, stages: Sequence[Any], microbatches: int, loss_fn: Callable[..., Any]) -> Any:
    """Return torch's schedule over this rank's stages."""
    _silence()
    # The loss says itself what each micro-batch weighs.
    settings = {"loss_fn": loss_fn, "scale_grads": False}
    if (order := kind.order_of(microbatches, stages[0].num_stages)) is not None:
        rows = [line.split(",") for line in schedule_to_csv(order).splitlines()]
        return runtime_of(rows, stages, microbatches, **settings)
    schedule = getattr(pipelining.schedules, kind.torch_name)
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
