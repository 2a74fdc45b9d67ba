"""Schedules by name, orders of one's own, and torch's runtime for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch.distributed.pipelining.schedules as torch_schedules

from pipesight._torch.pipelining import STEP_FUNCTION, runtime_of
from pipesight.plan.schedule_files import load_schedule
from pipesight.schedule.csv_format import schedule_to_csv
from pipesight.schedule.schedule_check import check_schedule
from pipesight.schedule.supported_schedules import BY_NAME, RankSchedule, by_name, of_order
from pipesight.schedule.task_orders import Schedule

__all__ = ["choose", "make", "names"]


def names() -> list[str]:
    """Return the names of the schedules."""
    return [*BY_NAME]


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
    if (kind := by_name(schedule)) is not None:
        return kind
    listed = ", ".join(repr(known) for known in names())
    raise ValueError(f"schedule {schedule!r} is neither a .csv file nor one of {listed}")


def make(order: Schedule, stages: Sequence[Any], loss_fn: Callable[..., Any]) -> Any:
    """Return what runs an order over this rank's stages."""
    _silence()
    rows = [line.split(",") for line in schedule_to_csv(order).splitlines()]
    # The loss says itself what each micro-batch weighs.
    return runtime_of(rows, stages, order.chunks, loss_fn=loss_fn, scale_grads=False)


class _NoTables(logging.Filter):
    """Drops the drawing of the whole schedule that torch logs before it raises what a layer raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.levelno == logging.ERROR and record.funcName == STEP_FUNCTION)


_NO_TABLES = _NoTables()


def _silence() -> None:
    torch_schedules.logger.addFilter(_NO_TABLES)  # once, however often it is added
