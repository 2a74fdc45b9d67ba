"""The numbers of a running training: its last step, and medians over the steps before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesight.analysis.partition_placement import rank_of_partition
from pipesight.analysis.program_report import ProgramReport
from pipesight.analysis.report import Report
from pipesight.analysis.step_grouping import EVALUATION, TRAINING
from pipesight.analysis.step_times import PARTS
from pipesight.runs.reading.event_tables import Column

__all__ = ["LatestStep", "PartitionBubble", "StepNumbers", "latest_step", "steps_of"]


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """One step. Times are microseconds, shares are of 1."""

    step: int
    time: float
    bubble: float | None
    """``None`` in a program without a pipeline; so is the next."""
    bound: float | None
    samples_per_second: float | None
    parts: tuple[float, ...]
    """Where the time went, in the order of `LatestStep.names`."""
    whole: bool = True
    """Whether its time includes everything up to the next step, such as an evaluation, or a pause."""


@dataclass(frozen=True, slots=True)
class PartitionBubble:
    """The bubble of a partition, or of its rank if that computes for several partitions in turn."""

    last: float
    usual: float
    """The median over the steps that are kept."""


@dataclass(frozen=True, slots=True)
class LatestStep:
    """The last step, and what is usual over the steps that are kept."""

    steps: int
    last: StepNumbers
    usual: StepNumbers
    """Medians, except for the samples per second: all samples over the whole time, including pauses."""
    partitions: tuple[PartitionBubble, ...]
    names: tuple[str, ...] = PARTS
    """The parts of a step."""
    left_out: int | None = None
    """The last step of a run that has ended. It lacks what comes before a next step, so it cannot be compared."""


def steps_of(report: Report, *, ended: bool = False) -> list[StepNumbers]:
    """Return the complete steps, in order. Of several replicas, a step takes as long as the slowest.

    If the run has ``ended``, no step comes after the last.
    """
    if report.program is not None:
        return _steps_of_program(report.program)
    times = report.steps.over_replicas()
    samples = times.samples / np.maximum(times.period, 1) * 1e6
    return [
        StepNumbers(
            int(number),
            float(times.period[k]),
            float(times.bubble[k]),
            float(times.bound[k]),
            float(samples[k]) if times.samples[k] >= 0 else None,
            tuple(times.parts[:, k].tolist()),
            whole=not (ended and k == len(times) - 1 and _is_shorter(report, times.step)),
        )
        for k, number in enumerate(times.step)
    ]


def _steps_of_program(program: ProgramReport) -> list[StepNumbers]:
    steps, found = program.steps, []
    for number in np.unique(steps.step).tolist():
        own = steps.where(steps.step == number)
        time = float(own.period.max())
        known = (own.samples >= 0).all()
        speed = float(own.samples.sum()) / max(time, 1.0) * 1e6 if known else None
        found.append(StepNumbers(number, time, None, None, speed, tuple(own.parts.mean(axis=1).tolist())))
    return found


def _is_shorter(report: Report, numbers: Column) -> bool:
    """Return whether the last step ends early: others last until the next begins, and after it there is none."""
    begun = report.minibatches.step[report.minibatches.kind != EVALUATION]
    followed = np.isin(numbers + 1, begun)
    return bool(followed[:-1].any() and not followed[-1])


def latest_step(report: Report, *, ended: bool = False, replica: int = 0) -> LatestStep | None:
    """Return the numbers of a run, if there is a complete step; see `steps_of`. Partitions are those of one replica."""
    steps = steps_of(report, ended=ended)
    if not steps:
        return None
    left_out = None
    if not steps[-1].whole:
        left_out = steps.pop().step
    program = report.program
    if program is None:
        counted = set(np.unique(report.steps.step[report.counted]).tolist())
    else:
        counted = set(np.unique(program.steps.step[program.counted]).tolist())
    usual = [step for step in steps if step.step in counted] or steps
    known = [step.samples_per_second * step.time for step in usual if step.samples_per_second is not None]
    last = steps[-1]
    return LatestStep(
        steps=len(usual),
        last=last,
        usual=StepNumbers(
            step=last.step,
            time=_median([step.time for step in usual]),
            bubble=_known_median([step.bubble for step in usual]),
            bound=_known_median([step.bound for step in usual]),
            samples_per_second=sum(known) / sum(step.time for step in usual) if len(known) == len(usual) else None,
            parts=tuple(_median([step.parts[k] for step in usual]) for k in range(len(last.parts))),
        ),
        partitions=_partitions(report, last.step, {step.step for step in usual}, replica),
        names=PARTS if program is None else program.steps.names,
        left_out=left_out,
    )


def _median(values: list[float]) -> float:
    return float(np.median(values))


def _known_median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _median(known) if known else None


def _partitions(report: Report, last: int, usual: set[int], replica: int) -> tuple[PartitionBubble, ...]:
    """Return the bubble of the worker of each partition, in the pipeline that the last step ran through."""
    minibatches = report.minibatches
    training = (minibatches.kind == TRAINING) & (minibatches.replica == replica)
    if not (training & (minibatches.step == last)).any():
        return ()
    n = int(minibatches.partitions[training & (minibatches.step == last)].max())
    rows = np.flatnonzero(training & (minibatches.partitions == n))
    busy = np.stack([_busy(report, int(row), n) for row in rows]) @ _sharing(report, n)
    window = (minibatches.end - minibatches.begin)[rows].astype(float)
    steps, which = np.unique(minibatches.step[rows], return_inverse=True)
    whole = np.maximum(np.bincount(which, window), 1)
    bubble = np.stack([1 - np.bincount(which, busy[:, j]) / whole for j in range(n)])
    chosen = bubble[:, np.isin(steps, list(usual))] if np.isin(steps, list(usual)).any() else bubble
    now = bubble[:, steps == last][:, 0]
    return tuple(PartitionBubble(float(now[j]), float(np.median(chosen[j]))) for j in range(n))


def _sharing(report: Report, partitions: int) -> NDArray[np.float64]:
    """Return which partitions have the same worker: a row and a column for each."""
    ranks = np.array(rank_of_partition(report.tasks, partitions))
    together = (ranks[:, None] == ranks) & np.isin(ranks, list(report.taking_turns))
    return np.where(together, 1.0, np.eye(partitions))


def _busy(report: Report, row: int, partitions: int) -> NDArray[np.float64]:
    first = int(report.minibatches.first[row])
    own = slice(first, first + int(report.minibatches.count[row]))
    times = report.tasks.end[own] - report.tasks.begin[own]
    return np.bincount(report.tasks.partition[own], times, partitions).astype(np.float64)
