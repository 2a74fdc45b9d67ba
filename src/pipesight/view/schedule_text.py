"""A schedule as text: a line per device, a cell per unit of time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipesight.schedule.simulation import simulate
from pipesight.schedule.task_orders import KINDS, Schedule

__all__ = ["draw"]

MOST = 2000
"""Cells of a line."""


def draw(schedule: Schedule, *, times: Sequence[float] = (1, 1, 1, 1), unit: float = 1.0) -> str:
    """Return a schedule as text, as it runs if the tasks of a kind all take equally long.

    A cell is a task that begins in this unit of time: its kind, its micro-batch and, where a device has several stages,
    its stage after a dot. Dots on their own are a task that goes on.

    >>> print(draw(one_f_one_b(2, 2)))
    device 0  F0 F1    B0    B1
    device 1     F0 B0 F1 B1

    Args:
        schedule: What to draw.
        times: How long a forward, a recomputation, a backward and a weight gradient take.
        unit: The time of a cell.

    Raises:
        DeadlockError: The schedule cannot run.
        ValueError: The line would be too long.
    """
    found = simulate(schedule, np.asarray(times, float)[:, None, None])
    length = round(float(found.makespan) / unit)
    if length > MOST:
        raise ValueError(f"too long to draw: {length:,} cells, of at most {MOST:,}; use a larger unit, or fewer chunks")
    several = schedule.stages > schedule.devices
    cells = [[""] * length for _ in range(schedule.devices)]
    for device, row in enumerate(schedule.order.tolist()):
        for kind, stage, i in row:
            if kind < 0:
                continue
            first, last = (round(float(at[kind, stage, i]) / unit) for at in (found.begin, found.end))
            for place in range(first, max(last, first + 1)):
                if place < length:
                    cells[device][place] = ".."
            cells[device][min(first, length - 1)] = f"{KINDS[kind]}{i}" + (f".{stage}" if several else "")
    width = max((len(cell) for row in cells for cell in row), default=0)
    label = len(f"device {schedule.devices - 1}")
    lines = [
        f"{f'device {device}':<{label}}  " + " ".join(f"{cell:<{width}}" for cell in row)
        for device, row in enumerate(cells)
    ]
    return "\n".join(line.rstrip() for line in lines)
