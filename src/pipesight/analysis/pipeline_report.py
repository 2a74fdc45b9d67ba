"""The pipelines of a run, each with its bubble, partition by partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipesight.analysis.bubble_losses import LOSSES, WindowSplit
from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.partition_placement import Placement
from pipesight.analysis.step_grouping import MiniBatchTable
from pipesight.analysis.step_times import Summary, summary
from pipesight.analysis.stragglers import PartitionTimes
from pipesight.analysis.timed_steps import TimedSteps
from pipesight.runs.reading.event_codes import PHASES
from pipesight.runs.reading.event_tables import Tasks

__all__ = ["PartitionReport", "PipelineReport", "describe_pipelines", "partition_times"]


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """A partition in the mean mini-batch, in microseconds. ``busy`` and ``losses`` add up to the window.

    The bubble is the share of it without a task. What a task waits for a processor is a loss too, but in no bubble.
    """

    partition: int
    """Its number."""
    device: str | None
    """Such as `cuda:0`; `None` if it is not known."""
    ranks: tuple[int, ...]
    """Those that run it, one per replica."""
    bubble: float
    """The share of the window without a task."""
    busy: float
    """Time in tasks, less waits for a processor."""
    phases: Mapping[str, float]
    """Time in each phase: `forward`, `recompute`, `backward`, `weight`."""
    losses: Mapping[str, float]
    """Idle time by cause."""


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """The mini-batches that ran through one pipeline, in steps that count."""

    facts: DescribedPipeline
    """The pipeline as `run.json` describes it, for a mini-batch of the usual size."""
    partitions: int
    """How many."""
    chunks: int
    """Micro-batches per mini-batch."""
    devices: int
    """Of each replica; fewer than partitions where some share one."""
    device_idle: float
    """The share of windows in which devices do not compute, over all of them."""
    workers: int
    """Of each replica: ranks, or workers of one process, where each has several partitions and computes for one at a
    time; else partitions."""
    on_processors: int
    """How many of the workers compute on the CPU."""
    replicas: int
    """How many ran it."""
    minibatches: int
    """How many are counted."""
    window: Summary
    """From the first forward of a mini-batch to its last backward."""
    bubble: float
    """Of the workers."""
    bubbles: Summary
    """The same, mini-batch by mini-batch."""
    bound: float
    """The bubble that the schedule itself has."""
    textbook: float
    """(n - 1) / (m + n - 1), what GPipe has without recomputation."""
    rows: tuple[PartitionReport, ...]
    """One per partition."""

    @property
    def worker_noun(self) -> str:
        """What a worker with several partitions is: a rank, or in one process a worker."""
        return "rank" if self.facts.workers is None else "worker"

    def only(self, partition: int) -> PipelineReport:
        """Return the same with one partition alone."""
        return replace(self, rows=tuple(row for row in self.rows if row.partition == partition))


def describe_pipelines(steps: TimedSteps, tasks: Tasks, described: Sequence[DescribedPipeline]) -> list[PipelineReport]:
    """Put the counted mini-batches with equally many partitions together, the pipeline with the most time first."""
    found = []
    for n in sorted({split.busy.shape[1] for split in steps.splits}):
        if own := _counted(steps, n):
            facts = next((pipeline for pipeline in described if pipeline.partitions == n), DescribedPipeline(n))
            found.append(_pipeline(own, facts, steps.minibatches, _ranks(tasks, n), steps.placements[n]))
    return sorted(found, key=lambda pipeline: -pipeline.window.mean * pipeline.minibatches)


def _counted(steps: TimedSteps, partitions: int) -> list[WindowSplit]:
    """Return the mini-batches of one pipeline that count."""
    counted = steps.counted_minibatches
    own = [s.where(np.flatnonzero(counted[s.rows])) for s in steps.splits if s.busy.shape[1] == partitions]
    return [split for split in own if len(split.rows)]


def _ranks(tasks: Tasks, partitions: int) -> list[tuple[int, ...]]:
    if len(tasks) and tasks.rank.min() == tasks.rank.max():
        return [(int(tasks.rank[0]),)] * partitions
    width = int(tasks.rank.max(initial=0)) + 1
    pairs = np.unique(tasks.partition.astype(np.int64) * width + tasks.rank)
    return [tuple((pairs[pairs // width == j] % width).tolist()) for j in range(partitions)]


def _pipeline(
    splits: Sequence[WindowSplit],
    facts: DescribedPipeline,
    minibatches: MiniBatchTable,
    ranks: Sequence[tuple[int, ...]],
    placement: Placement,
) -> PipelineReport:
    rows = np.concatenate([split.rows for split in splits])
    window = np.concatenate([split.window for split in splits])
    busy = np.concatenate([split.busy for split in splits])
    computing = np.concatenate([split.worker_busy.mean(axis=1) for split in splits])
    losses = np.concatenate([split.losses for split in splits], axis=1).mean(axis=1)
    phases = np.concatenate([split.phases for split in splits], axis=1).mean(axis=1)
    crowded = np.concatenate([split.crowded for split in splits]).mean(axis=0)
    losses[LOSSES.index("sharing")] += crowded
    bound = np.concatenate([split.bound for split in splits])
    devices, workers = len({*placement.devices}), placement.workers
    n, m = facts.partitions, int(np.median(minibatches.chunks[rows]))
    partitions = [
        PartitionReport(
            partition=j,
            device=facts.devices[j] if facts.devices is not None else None,
            ranks=ranks[j],
            bubble=float(1 - busy[:, j].sum() / max(window.sum(), 1)),
            busy=float(busy[:, j].mean() - crowded[j]),
            phases={name: float(phases[p, j]) for p, name in enumerate(PHASES) if phases[p].any()},
            losses={name: float(losses[k, j]) for k, name in enumerate(LOSSES)},
        )
        for j in range(n)
    ]
    return PipelineReport(
        facts=facts,
        partitions=n,
        chunks=m,
        devices=devices,
        device_idle=float(max(0.0, 1 - busy.sum() / max(devices * window.sum(), 1))),
        workers=len({*workers}),
        on_processors=len({w for w, name in zip(workers, facts.devices or (), strict=False) if name.startswith("cpu")}),
        replicas=len(np.unique(minibatches.replica[rows])),
        minibatches=len(rows),
        window=summary(window),
        bubble=float(1 - computing.sum() / max(window.sum(), 1)),
        bubbles=summary(1 - computing / np.maximum(window, 1)),
        bound=float(np.median(bound)),
        textbook=(n - 1) / (m + n - 1),
        rows=tuple(partitions),
    )


def partition_times(steps: TimedSteps, tasks: Tasks, replicas: Mapping[int, int]) -> list[PartitionTimes]:
    """Return how long each partition of each rank computed in every counted step, of the most common pipeline."""
    sizes = [split.busy.shape[1] for split in steps.splits]
    if not sizes:
        return []
    n = max(sizes, key=lambda size: sum(len(s.rows) for s in steps.splits if s.busy.shape[1] == size))
    if not (own := _counted(steps, n)):
        return []
    rows = np.concatenate([split.rows for split in own])
    busy = np.concatenate([split.busy for split in own])
    replica, step = steps.minibatches.replica[rows], steps.minibatches.step[rows]
    lanes = []
    for j, ranks in enumerate(_ranks(tasks, n)):
        for rank in ranks:
            mine = replica == replicas[rank]
            numbers, which = np.unique(step[mine], return_inverse=True)
            times = np.bincount(which, busy[mine, j], len(numbers)).astype(float)
            lanes.append(PartitionTimes(rank, j, numbers, times))
    return lanes
