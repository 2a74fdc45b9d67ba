"""Read schedules from files, and write them: CSV, as torch.distributed.pipelining takes it."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from pipesight.schedule.csv_format import schedule_from_csv, schedule_to_csv
from pipesight.schedule.schedule_check import check_schedule
from pipesight.schedule.task_orders import Schedule

__all__ = ["load_schedule", "save_schedule"]


def load_schedule(path: str | PathLike[str], *, recompute: Sequence[bool] = ()) -> Schedule:
    """Read a schedule from a CSV file: a line per device, cells such as ``2F0``, and check that it can run.

    Example::

        schedule = load_schedule("schedule.csv")
        print(check_schedule(schedule).held)

    Args:
        path: The file. Its name without the ending is that of the schedule.
        recompute: For each micro-batch, whether its forward is run again; see `recomputed`. The file does not say.

    Raises:
        OSError: It cannot be read.
        ValueError: It has no schedule, or one that cannot run.
    """
    file = Path(path)
    try:
        schedule = schedule_from_csv(file.read_text(encoding="utf-8"), name=file.stem, recompute=recompute)
        check_schedule(schedule).raise_problems()
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None
    return schedule


def save_schedule(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a schedule to a CSV file that `load_schedule` and torch.distributed.pipelining read.

    Recomputations are not written: they are part of backwards.
    """
    Path(path).write_text(schedule_to_csv(schedule), encoding="utf-8")
