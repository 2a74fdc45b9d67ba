"""The lanes of a timeline, one for each partition of a rank, and their bubbles in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.step_breakdown import Cover
from pipesight.analysis.step_grouping import EVALUATION, INCOMPLETE, MiniBatchTable
from pipesight.runs.reading.event_tables import Tasks

__all__ = ["Lane", "lane_bubbles", "lanes_of"]


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """A partition of a rank, and the replica that the rank belongs to."""

    rank: int
    partition: int
    replica: int


def lanes_of(tasks: Tasks, replicas: Mapping[int, int]) -> list[Lane]:
    """Return the lanes with tasks, by rank and partition."""
    pairs = np.unique(np.stack([tasks.rank, tasks.partition], axis=1).astype(np.int64), axis=0)
    return [Lane(rank, partition, replicas[rank]) for rank, partition in pairs.tolist()]


def lane_bubbles(
    minibatches: MiniBatchTable, tasks: Tasks, lanes: Sequence[Lane], *, taking_turns: Collection[int] = ()
) -> list[float | None]:
    """Return the share of its windows in which each lane is idle, or its rank where its lanes take turns.

    Of the mini-batches of a step, evaluations are skipped if there is anything else. ``taking_turns`` are ranks that
    compute for one of their partitions at a time.

    Returns:
        ``None`` for a lane without a window, and for all if a mini-batch is incomplete.
    """
    trained = minibatches.kind != EVALUATION
    counted = minibatches.where(trained) if trained.any() else minibatches
    if (counted.kind == INCOMPLETE).any():
        return [None] * len(lanes)
    own = tasks.where(counted.task_rows())
    lengths = counted.end - counted.begin
    windows = {replica: int(lengths[counted.replica == replica].sum()) for replica in np.unique(counted.replica)}
    partition = np.where(np.isin(own.rank, list(taking_turns)), -1, own.partition)
    busy: dict[tuple[int, int], int] = {}
    for rank, j in {(lane.rank, -1 if lane.rank in taking_turns else lane.partition) for lane in lanes}:
        mine = own.where((own.rank == rank) & (partition == j))
        busy[rank, j] = Cover(mine.begin, mine.end).total
    return [
        1 - busy[lane.rank, -1 if lane.rank in taking_turns else lane.partition] / max(windows[lane.replica], 1)
        if lane.replica in windows
        else None
        for lane in lanes
    ]
