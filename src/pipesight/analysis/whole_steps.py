"""Which steps of a trace of operations are whole: a replay of others would be too short, and say nothing of it."""

from __future__ import annotations

import numpy as np

from pipesight.analysis.operation_graph import BACKWARD, FORWARD, OPTIMIZER
from pipesight.runs.reading.event_tables import Column, Operations
from pipesight.runs.reading.operation_kinds import codes_of

__all__ = ["whole_steps"]

USUALLY = 0.5
"""The share of steps in which a worker runs an operation, from which a step without it is not whole."""


def whole_steps(operations: Operations) -> Column:
    """Return the numbers of the steps in which nothing is missing.

    Every worker of the trace has a backward for each forward, at least one, and ends the step as it usually does: with
    the same kinds of collectives, and the optimizer.
    """
    steps, step = np.unique(operations.step, return_inverse=True)
    code = operations.replica.astype(np.int64) * (int(operations.stage.max()) + 1) + operations.stage
    workers, worker = np.unique(code, return_inverse=True)
    part = np.where(operations.part < 0, operations.stage, operations.part)
    parts, most = int(part.max()) + 1, int(operations.microbatch.max()) + 1
    rows = np.flatnonzero(((operations.kind == FORWARD) | (operations.kind == BACKWARD)) & (operations.microbatch >= 0))
    task = (step[rows] * len(workers) + worker[rows]) * parts + part[rows]
    task = (task * most + operations.microbatch[rows]) * 2 + (operations.kind[rows] == BACKWARD)
    tasks, count = np.unique(task, return_counts=True)
    lane = tasks // (2 * most * parts)
    alone = (count > 1) | ~np.isin(tasks ^ 1, tasks, assume_unique=True)
    computed = np.bincount(lane, minlength=len(steps) * len(workers)) > 0
    whole = computed & (np.bincount(lane, alone, len(computed)) == 0)
    whole = whole.reshape(len(steps), len(workers))
    for kind in (*codes_of("after"), OPTIMIZER):
        own = operations.kind == kind
        there = np.zeros_like(whole)
        there[step[own], worker[own]] = True
        whole &= there | (there.mean(axis=0) <= USUALLY)
    found: Column = steps[whole.all(axis=1)]
    return found
