"""Where partitions run: on which device, on which rank, and what computes for them one task at a time, the worker.

A worker is a partition or, where each rank has several and computes for one at a time, the rank. Schedules such as
interleaved 1F1B do that on purpose::

    rank 0   F0 of partition 0   F1 of partition 0   F0 of partition 2   F1 of partition 2   ...
    rank 1                       F0 of partition 1   F1 of partition 1   F0 of partition 3   ...

Partition 2 is idle while rank 0 computes for partition 0, but nothing is lost: the bubble is that of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.step_grouping import MiniBatchTable
from pipesight.runs.reading.event_tables import Tasks

__all__ = ["Placement", "place_partitions", "rank_of_partition"]

OVERLAP = 0.01
"""The share of the time computing that tasks of one rank may overlap: times are rounded to microseconds."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the partitions of one pipeline run."""

    devices: tuple[int, ...]
    """A number for the device of each partition; those with the same number take turns."""
    workers: tuple[int, ...]
    """The worker of each partition."""
    processors: int | None
    """How many processors the partitions of a replica share, if all compute on the CPU of one machine."""


def place_partitions(
    described: Iterable[DescribedPipeline], minibatches: MiniBatchTable, tasks: Tasks
) -> dict[int, Placement]:
    """Return the placement of each pipeline that ran, by its number of partitions."""
    known = {pipeline.partitions: pipeline for pipeline in reversed([*described])}
    found = {}
    for n in np.unique(minibatches.partitions).tolist():
        pipeline, own = known.get(n), minibatches.where(minibatches.partitions == n)
        ranks = rank_of_partition(tasks, n)
        over_ranks = len({*ranks}) > 1 or (pipeline is not None and pipeline.ranks is not None)
        found[n] = Placement(
            devices=_devices(pipeline, ranks) if not over_ranks else _numbered(ranks),
            workers=_workers(ranks, own, tasks) if over_ranks else _threads(pipeline, n),
            processors=_processors(pipeline, own),
        )
    return found


def rank_of_partition(tasks: Tasks, partitions: int) -> list[int]:
    """Return the lowest rank that has each partition: that of the first replica."""
    lowest = np.full(partitions, np.iinfo(np.int64).max)
    inside = tasks.partition < partitions
    np.minimum.at(lowest, tasks.partition[inside], tasks.rank[inside])
    ranks: list[int] = lowest.tolist()
    return ranks


def _devices(pipeline: DescribedPipeline | None, ranks: Sequence[int]) -> tuple[int, ...]:
    """Number the devices within one process: CPU partitions have a thread each, those on one GPU share it."""
    if pipeline is not None and pipeline.workers is not None:
        return _numbered(pipeline.workers)
    if pipeline is None or pipeline.devices is None:
        return tuple(range(len(ranks)))
    return _numbered([j if name.startswith("cpu") else name for j, name in enumerate(pipeline.devices)])


def _threads(pipeline: DescribedPipeline | None, partitions: int) -> tuple[int, ...]:
    """Number the workers within one process: the partitions, unless a schedule lets several share one on the CPU."""
    if pipeline is None or pipeline.workers is None or not all(d.startswith("cpu") for d in pipeline.devices or ()):
        return tuple(range(partitions))
    return _numbered(pipeline.workers)


def _numbered(names: Iterable[object]) -> tuple[int, ...]:
    """Number names from 0, equal ones alike."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _processors(pipeline: DescribedPipeline | None, minibatches: MiniBatchTable) -> int | None:
    if pipeline is None or pipeline.processors is None or not pipeline.devices:
        return None
    if not all(name.startswith("cpu") for name in pipeline.devices):
        return None
    return max(1, pipeline.processors // max(1, len(np.unique(minibatches.replica))))


def _workers(ranks: Sequence[int], minibatches: MiniBatchTable, tasks: Tasks) -> tuple[int, ...]:
    """Number the workers of a pipeline over ranks: the ranks, unless each has one partition or their tasks overlap."""
    if len({*ranks}) == len(ranks) or _overlap(minibatches, tasks) > OVERLAP:
        return tuple(range(len(ranks)))
    return _numbered(ranks)


def _overlap(minibatches: MiniBatchTable, tasks: Tasks) -> float:
    """Return the share of the time computing in which a rank was already busy with another task."""
    own = tasks.where(minibatches.task_rows())
    both = 0
    for rank in np.unique(own.rank).tolist():
        mine = own.where(own.rank == rank)
        order = np.argsort(mine.begin, kind="stable")
        begin, end = mine.begin[order], mine.end[order]
        reached = np.maximum.accumulate(end)[:-1]
        both += int(np.clip(np.minimum(reached, end[1:]) - begin[1:], 0, None).sum())
    return both / max(int((own.end - own.begin).sum()), 1)
