"""All counted steps of a run together: step time, throughput, bubble, and where the time of the mean step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.bubble_losses import WindowSplit
from pipesight.analysis.step_times import PARTS, StepTimes, Summary, summary
from pipesight.runs.reading.event_tables import Column

__all__ = ["Overall", "overall_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Overall:
    """All counted steps together; times in microseconds."""

    steps: int
    """How many are counted."""
    replicas: int
    """How many replicas ran each step; the numbers are over all of them."""
    time: Summary
    """Of a step."""
    elapsed: float
    """What the steps took together, including pauses between them; of several replicas, the slowest."""
    steps_per_second: float
    """Steps over ``elapsed``; so are samples and micro-batches."""
    samples_per_second: float | None
    """`None` if the number of samples was not recorded."""
    microbatches_per_second: float
    """Over all replicas."""
    bubble: float
    """The share of all windows in which partitions are idle, or ranks that have several."""
    bubbles: Summary
    """The same, step by step."""
    bound: float
    """The bubble of the schedule alone, over all windows too."""
    recompute: float
    """The share of computing that is recomputation."""
    parts: Mapping[str, float]
    """Of the mean step; they add up to ``time.mean``."""
    turnaround: float
    """The part of the host gaps between forward and backward, such as the loss."""
    spreads: Mapping[str, Summary]
    """Of the parts, step by step."""


def overall_of(times: StepTimes, splits: Sequence[WindowSplit], minibatches: Column) -> Overall:
    """Put the counted steps together."""
    steps = len(np.unique(times.step))
    elapsed = float(np.bincount(times.replica, times.period).max())
    samples = float(times.samples.sum()) / elapsed * 1e6 if (times.samples >= 0).all() else None
    phases = np.sum([split.phases[:, minibatches[split.rows]].sum(axis=(1, 2)) for split in splits], axis=0)
    return Overall(
        steps=steps,
        replicas=len(np.unique(times.replica)),
        time=summary(times.period),
        elapsed=elapsed,
        steps_per_second=steps / elapsed * 1e6,
        samples_per_second=samples,
        microbatches_per_second=float(times.microbatches.sum()) / elapsed * 1e6,
        bubble=float((times.bubble * times.window).sum() / max(times.window.sum(), 1)),
        bubbles=summary(times.bubble),
        bound=float((times.bound * times.window).sum() / max(times.window.sum(), 1)),
        recompute=float(phases[1] / max(phases.sum(), 1)),
        parts=times.mean_parts(),
        turnaround=float(times.turnaround.mean()),
        spreads={name: summary(part) for name, part in zip(PARTS, times.parts, strict=True)},
    )
