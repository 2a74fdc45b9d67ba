"""Schedules as CSV, in the format of torch.distributed.pipelining: a line per device, a cell per task.

A cell is stage, kind and micro-batch::

    0F0,0F1,1F0,1B0,0I0,...       F  forward                    I  gradient of the input
                                  B  whole backward             W  gradients of the weights

Empty cells are waits, and mean nothing: a device runs its next task as soon as it can. Recomputations have no cells;
they are part of a backward. `(0F3;3B1)OVERLAP_F_B` is read as the two tasks, one after the other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from pipesight.schedule.messages import Action, Kind
from pipesight.schedule.task_orders import KINDS, B, F, R, Schedule, W, schedule_of

__all__ = ["actions_from_csv", "schedule_from_csv", "schedule_to_csv"]

_CELL = re.compile(r"(\d+)(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_WITHOUT_TASK = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def schedule_to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV.

    >>> schedule_to_csv(zero_bubble(2, 2)).splitlines()
    ['0F0,0F1,0I0,0W0,0I1,0W1', '1F0,1I0,1F1,1I1,1W0,1W1']
    """
    split = schedule.split
    lines = []
    for row in schedule.order.tolist():
        cells = []
        for kind, stage, i in row:
            if kind >= 0 and kind != R:
                cells.append(f"{stage}{'I' if kind == B and split[stage, i] else KINDS[kind]}{i}")
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def schedule_from_csv(text: str, *, name: str = "csv", recompute: Sequence[bool] = ()) -> Schedule:
    r"""Read a schedule from CSV.

    >>> schedule_from_csv("0F0,0B0\n1F0,1B0").device_of_stage
    (0, 1)

    ``recompute`` says for each micro-batch whether its forward is run again; see `recomputed`.

    Raises:
        ValueError: A cell is no task, the tasks make no schedule, or sends and receives are among them.
    """
    rows = actions_from_csv(text)
    sent = next((action for row in rows for action in row if action.kind not in (Kind.F, Kind.I, Kind.B, Kind.W)), None)
    if sent is not None:
        raise ValueError(
            f"a schedule has no sends and receives, which follow from its tasks (cell: {sent}); write the file with "
            "format='compute_only'"
        )
    tasks = [action for row in rows for action in row]
    if not tasks:
        raise ValueError("a schedule must have at least one task (tasks: 0)")
    for what, most in (("stage", max(task.stage for task in tasks)), ("micro-batch", max(task.i for task in tasks))):
        if most >= len(tasks):
            raise ValueError(f"there are too few tasks for {what} {most} (tasks: {len(tasks)}); count from 0")
    _check_backwards(tasks)
    homes = _homes(rows)
    chunks = 1 + max(action.i for action in tasks)
    kinds = {Kind.F: F, Kind.I: B, Kind.B: B, Kind.W: W}
    orders = [[(kinds[action.kind], action.stage, action.i) for action in row] for row in rows]
    return schedule_of(name, homes, chunks, orders, recompute)


def actions_from_csv(text: str) -> list[list[Action]]:
    """Read what each device does, sends and receives included; ``ValueError`` if a cell is no action."""
    lines = list(csv.reader(io.StringIO(text, newline="")))
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    return [
        [action for place, cell in enumerate(line, 1) for action in _actions(cell.strip(), number, place)]
        for number, line in enumerate(lines, 1)
    ]


def _actions(cell: str, line: int, place: int) -> Iterator[Action]:
    if not cell or _WITHOUT_TASK.fullmatch(cell):
        return
    if (pair := _PAIR.fullmatch(cell)) is not None:
        for part in pair[1].split(";"):
            yield from _actions(part.strip(), line, place)
        return
    if (found := _CELL.fullmatch(cell)) is None:
        raise ValueError(
            f"a cell must be stage, F, I, B or W, and micro-batch, such as 2F0 (line {line}, cell {place}: {cell!r})"
        )
    yield Action(Kind(found[2]), int(found[1]), int(found[3]))


def _check_backwards(tasks: Sequence[Action]) -> None:
    """Raise unless gradients of weights are either part of a backward, or follow one of the input."""
    of = {kind: {(task.stage, task.i) for task in tasks if task.kind == kind} for kind in (Kind.I, Kind.B, Kind.W)}
    for more, wrong in (
        ("is a whole backward, and has a weight gradient, too: write I instead of B", of[Kind.B] & of[Kind.W]),
        ("is a whole backward, and one of the input", of[Kind.B] & of[Kind.I]),
        ("has no weight gradient: write B instead of I, or add W", of[Kind.I] - of[Kind.W]),
        ("has no gradient of the input: write B instead of W, or add I", of[Kind.W] - of[Kind.I]),
    ):
        if wrong:
            stage, i = min(wrong)
            raise ValueError(f"the backward of micro-batch {i} in stage {stage} {more}")


def _homes(rows: Sequence[Sequence[Action]]) -> list[int]:
    """Return the device of each stage."""
    found: dict[int, int] = {}
    for device, row in enumerate(rows):
        for action in row:
            if (other := found.setdefault(action.stage, device)) != device:
                raise ValueError(
                    f"each stage must be on one device (stage {action.stage}: devices {other} and {device})"
                )
    if missing := {*range(max(found) + 1)} - {*found}:
        raise ValueError(f"stages must be numbered from 0 without gaps (missing: {min(missing)})")
    return [found[stage] for stage in sorted(found)]
