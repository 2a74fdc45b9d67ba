"""A small run, and what is read of it: helpers for the tests of reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, RECOMPUTE
from pipesight.runs.reading.event_tables import Table
from pipesight.runs.reading.run import Run
from support.synthetic import Made

PHASES = {"forward": FORWARD, "recompute": RECOMPUTE, "backward": BACKWARD}

some_examples = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def rows(table: Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for column in table.columns().values()), strict=True))


def texts(run: Run) -> list[str]:
    return [note.text for note in run.notes]


def small(folder: Path, *, steps: int = 2) -> Made:
    """Return a run of two partitions and two micro-batches, the first of them recomputed."""
    made = Made(folder, balance=[2, 1], chunks=2)
    for step in range(steps):
        made.gpipe(
            step,
            lambda phase, i, j: 100 + 10 * i + j,
            at=step * 2000,
            checkpointed=1,
            layers=lambda j: [["a", "b"], ["c"]][j],
        )
    return made
