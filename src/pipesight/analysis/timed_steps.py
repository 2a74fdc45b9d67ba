"""The steps of a run, where the time of each went, and which of them count: all but warm-up and incomplete ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipesight.analysis.bubble_losses import WindowSplit, split_windows
from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.partition_placement import Placement, place_partitions
from pipesight.analysis.rank_waits import RankWaits
from pipesight.analysis.step_breakdown import break_down
from pipesight.analysis.step_grouping import INCOMPLETE, TRAINING, MiniBatchTable, StepTable, find_steps
from pipesight.analysis.step_times import StepTimes, warm_up
from pipesight.runs.reading.event_tables import Column, Spans, Tasks, Transfers

__all__ = ["TimedSteps", "time_steps"]


@dataclass(frozen=True, slots=True, eq=False)
class TimedSteps:
    """The steps that a report is about."""

    minibatches: MiniBatchTable
    """Those of the steps."""
    splits: Sequence[WindowSplit]
    """Where the windows of complete mini-batches went; rows are those of ``minibatches``."""
    placements: Mapping[int, Placement]
    """Where partitions run, by how many there are."""
    times: StepTimes
    """Where the time of complete steps went, warm-up included."""
    warm_up: Column
    """The numbers of the first steps if these are much slower than the rest."""
    incomplete: int
    """How many steps lack tasks."""
    requested: range | None
    """The steps that were asked for, if not all."""

    @property
    def counted(self) -> Column:
        """Which of ``times`` count."""
        return ~np.isin(self.times.step, self.warm_up)

    @property
    def counted_times(self) -> StepTimes:
        """The steps that count."""
        return self.times.where(self.counted)

    @property
    def counted_minibatches(self) -> Column:
        """Which mini-batches are of steps that count."""
        return np.isin(self.minibatches.step, self.counted_times.step)

    @property
    def counted_range(self) -> range | None:
        """The numbers of the steps that count; ``None`` for all of the run."""
        if not len(self.warm_up):
            return self.requested
        later = range(int(self.warm_up[-1]) + 1, int(self.times.step.max()) + 1)
        wanted = self.requested
        return later if wanted is None else range(max(later.start, wanted.start), wanted.stop)

    def main_split(self) -> WindowSplit | None:
        """Return the training mini-batches with the same tasks that took most of the counted time."""
        counted = self.counted_minibatches
        present = [split.where(np.flatnonzero(counted[split.rows])) for split in self.splits]
        trained = [s for s in present if len(s.rows) and self.minibatches.kind[s.rows[0]] == TRAINING]
        return max(trained, key=lambda split: int(split.window.sum()), default=None)


def time_steps(
    minibatches: MiniBatchTable,
    tasks: Tasks,
    spans: Spans,
    transfers: Transfers,
    *,
    described: Sequence[DescribedPipeline],
    replicas: Mapping[int, int],
    waits: RankWaits,
    only: range | None = None,
) -> TimedSteps:
    """Group mini-batches into steps and say where the time of each went.

    ``waits`` say which ranks waited for which in collectives; ``only`` has the steps that are wanted, if not all.

    Raises:
        ValueError: None of the wanted steps was recorded.
    """
    steps, own = find_steps(minibatches, spans, replicas)
    first = int(steps.step.min()) if len(steps) else 0
    if only is not None:
        steps, own = _only(only, steps, own)
    placements = place_partitions(described, own.where(own.kind != INCOMPLETE), tasks)
    splits = _splits(own, tasks, transfers, placements)
    times = break_down(steps, own, splits, all_minibatches=minibatches, spans=waits.attributed(), replicas=replicas)
    return TimedSteps(
        minibatches=own,
        splits=splits,
        placements=placements,
        times=times,
        warm_up=warm_up(times) if len(times) and times.step.min() == first else times.step[:0],
        incomplete=int((~steps.complete).sum()),
        requested=only,
    )


def _only(wanted: range, steps: StepTable, minibatches: MiniBatchTable) -> tuple[StepTable, MiniBatchTable]:
    """Keep some steps and their mini-batches."""
    rows = np.isin(steps.step, np.array(wanted)) if len(wanted) else np.zeros(len(steps), bool)
    if not rows.any():
        recorded = f"{steps.step.min()} to {steps.step.max()}" if len(steps) else "none"
        requested = f"{wanted.start}:{wanted.stop - 1}" if len(wanted) != 1 else f"{wanted.start}"
        raise ValueError(f"none of these steps was recorded (requested: {requested}, recorded: {recorded})")
    kept = steps.where(rows)
    first = np.cumsum(kept.count) - kept.count
    return StepTable(**{**kept.columns(), "first": first}), minibatches.where(kept.members())


def _splits(
    minibatches: MiniBatchTable, tasks: Tasks, transfers: Transfers, placements: Mapping[int, Placement]
) -> list[WindowSplit]:
    complete = np.flatnonzero(minibatches.kind != INCOMPLETE)
    splits = split_windows(
        minibatches.where(complete),
        tasks,
        transfers,
        devices=lambda partitions: placements[partitions].devices,
        workers=lambda partitions: placements[partitions].workers,
        processors=lambda partitions: placements[partitions].processors,
    )
    return [replace(split, rows=complete[split.rows]) for split in splits]
