"""Check a schedule: each task is there, no device waits for ever, and how much is held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipesight.schedule.memory import peak_bytes
from pipesight.schedule.messages import EarlyReceive, early_receives, message_problems, with_messages
from pipesight.schedule.simulation import DeadlockError, simulate
from pipesight.schedule.task_orders import KINDS, B, F, Schedule

__all__ = ["ScheduleCheck", "check_schedule"]


@dataclass(frozen=True, slots=True)
class ScheduleCheck:
    """What `check_schedule` found."""

    problems: tuple[str, ...]
    """Why it cannot run; empty if it can."""
    blocked: tuple[str, ...]
    """Why it could not run if each send took until its receive is posted. Sends of gloo and NCCL do not block the
    program, but a transport that does, does."""
    early: tuple[EarlyReceive, ...]
    """Receives that torch's runtime posts before tasks that do not need them. Where a receive blocks what follows, as
    it can on some GPUs, these tasks are late."""
    held: tuple[int, ...]
    """In how many stages of micro-batches each device holds activations at most."""
    held_in_stage: tuple[int, ...]
    """How many micro-batches each stage holds at most."""

    @property
    def runs(self) -> bool:
        """Whether it can run."""
        return not self.problems

    def raise_problems(self) -> None:
        """Raise ``ValueError`` if it cannot run."""
        if self.problems:
            raise ValueError(f"the schedule cannot run: {'; '.join(self.problems)}")


def check_schedule(schedule: Schedule) -> ScheduleCheck:
    """Check that a schedule has all tasks and cannot deadlock, and count what its devices hold.

    That no task is there twice, or before what it needs on the same device, is checked when a schedule is made.

    >>> check_schedule(one_f_one_b(2, 4)).held
    (2, 1)
    """
    problems = _missing(schedule)
    blocked: list[str] = []
    early: list[EarlyReceive] = []
    if not problems:
        try:
            simulate(schedule, np.ones((len(KINDS), 1, 1)))
        except DeadlockError as error:
            problems.append(str(error))
        else:
            rows = with_messages(schedule)
            blocked, early = message_problems(rows), early_receives(schedule, rows)
    ones = np.ones(schedule.stages)
    held = peak_bytes(schedule, ones * 0, ones)
    each = peak_bytes(schedule, np.zeros((schedule.stages,) * 2), np.eye(schedule.stages)).max(axis=0)
    return ScheduleCheck(
        tuple(problems),
        tuple(blocked),
        tuple(early),
        tuple(int(count) for count in held),
        tuple(int(count) for count in each),
    )


def _missing(schedule: Schedule) -> list[str]:
    tasks = schedule.order[schedule.order[..., 0] >= 0]
    there = np.zeros((len(KINDS), schedule.stages, schedule.chunks), bool)
    there[tasks[:, 0], tasks[:, 1], tasks[:, 2]] = True
    found = []
    for kind, what in ((F, "forward"), (B, "backward")):
        missing = np.argwhere(~there[kind])
        if len(missing):
            (stage, i), more = missing[0].tolist(), len(missing) - 1
            rest = f", and {more} more" if more else ""
            found.append(f"there is no {what} of micro-batch {i} in stage {stage}{rest}")
    return found
