"""Who computes: a partition by itself, or a rank that has several of them and computes for one at a time.

Schedules such as interleaved 1F1B give each rank several partitions, on purpose::

    rank 0   F0 of partition 0   F1 of partition 0   F0 of partition 2   F1 of partition 2   ...
    rank 1                       F0 of partition 1   F1 of partition 1   F0 of partition 3   ...

Partition 2 is idle while rank 0 computes for partition 0, but nothing is lost: the bubble is that of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipesight.analysis.step_grouping import MiniBatches
from pipesight.runs.reading.event_tables import Tasks

__all__ = ["workers_of"]

OVERLAP = 0.01
"""Of the time computing, how much tasks of one rank may overlap: their times are cut to whole microseconds."""


def workers_of(ranks: Sequence[int], minibatches: MiniBatches, tasks: Tasks) -> tuple[int, ...]:
    """Return the number of the worker that computes for each partition.

    That is its rank, if it has several and none of their tasks overlap. Otherwise partitions compute by themselves:
    threads of one process do, and those of GPipe on one GPU are meant to.

    Args:
        ranks: That of each partition, in one replica.
        minibatches: Those of as many partitions.
        tasks: The table that they were found in.
    """
    apart = tuple(range(len(ranks)))
    if len({*ranks}) == len(ranks) or _overlap(minibatches, tasks) > OVERLAP:
        return apart
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(rank, len(numbers)) for rank in ranks)


def _overlap(minibatches: MiniBatches, tasks: Tasks) -> float:
    """Return the share of the time computing in which a rank was busy with another task already."""
    first, count = minibatches.first, minibatches.count
    own = tasks.where(np.repeat(first - np.cumsum(count) + count, count) + np.arange(int(count.sum())))
    both = 0
    for rank in np.unique(own.rank).tolist():
        mine = own.where(own.rank == rank)
        order = np.argsort(mine.begin, kind="stable")
        begin, end = mine.begin[order], mine.end[order]
        reached = np.maximum.accumulate(end)[:-1]
        both += int(np.clip(np.minimum(reached, end[1:]) - begin[1:], 0, None).sum())
    return both / max(int((own.end - own.begin).sum()), 1)
