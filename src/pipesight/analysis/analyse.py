"""From the events of a run to its report: the analysis, step by step. `analyse` is the way through this package."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesight.analysis.advice import Situation, find_changes
from pipesight.analysis.bubble_losses import WindowSplit, split_windows
from pipesight.analysis.collectives import match_calls, name_collectives, waits_in
from pipesight.analysis.described_pipelines import DescribedPipeline, pipelines_of, replicas_in
from pipesight.analysis.layer_times import LayerReport, layer_reports, with_weights
from pipesight.analysis.measured_costs import Measured, measure_steps
from pipesight.analysis.nonfinite import first_nonfinite
from pipesight.analysis.partition_placement import Placement, place_partitions
from pipesight.analysis.pipeline_report import PipelineReport, describe_pipelines, partition_times
from pipesight.analysis.rank_links import LinkReport, find_links
from pipesight.analysis.rank_waits import RankWaits
from pipesight.analysis.remarks import remarks_on, remarks_on_bubble, remarks_on_clocks, with_ending, with_waits
from pipesight.analysis.report import ExcludedSteps, NameTime, Overall, Report
from pipesight.analysis.step_breakdown import PARTS, StepTimes, break_down, summary, warm_up
from pipesight.analysis.step_grouping import (
    EVALUATION,
    INCOMPLETE,
    TRAINING,
    MiniBatchTable,
    StepTable,
    find_minibatches,
    find_steps,
    replicas_of,
)
from pipesight.analysis.stragglers import find_stragglers
from pipesight.analysis.verdict import Verdict, verdict_on
from pipesight.runs.reading.event_tables import Column, Tasks, Transfers
from pipesight.runs.reading.stats_and_logs import NONFINITE_KEYS

if TYPE_CHECKING:
    from pipesight.runs.reading.run import Run
    from pipesight.schedule.costs import Link

__all__ = ["NoTasksError", "analyse", "measure"]

NAMES = 30
"""How many span names a report lists for a trace without tasks."""
ENVELOPE = "Trace"
"""The category of the span that PyTorch's profiler puts around all others."""


class NoTasksError(ValueError):
    """A run has nothing to plan by."""


def analyse(run: Run, *, steps: range | None = None, partition: int | None = None, layer: str | None = None) -> Report:
    """Analyse a run.

    Args:
        run: What `open_run` returns.
        steps: Only these.
        partition: Report the bubble, layers, stragglers and links of this one alone.
        layer: Report only layers of this name; ``*`` matches any part of one.

    Raises:
        ValueError: There is no such step, partition or layer.
    """
    # Events into mini-batches, mini-batches into steps.
    described = pipelines_of(run.description)
    all_tasks, spans, transfers = run.tasks(), run.spans(), run.transfers()
    replicas = replicas_of(all_tasks, replicas_in(described))
    sizes = {pipeline.partitions for pipeline in described}
    minibatches, tasks = find_minibatches(all_tasks, partitions=sizes, replicas=replicas)
    if not len(tasks):
        return _without_tasks(run)
    found, own = find_steps(minibatches, spans, replicas)
    first = int(found.step.min()) if len(found) else 0
    own, found = _of_steps(own, _chosen(found, steps))

    # Where the time of each window went, then that of each step.
    placements = place_partitions(described, own.where(own.kind != INCOMPLETE), tasks)
    splits = _splits(own, tasks, transfers, placements)
    calls = match_calls(run.communications(), run.description)
    waits = RankWaits(waits_in(calls), spans, minibatches, replicas)
    times = break_down(found, own, splits, all_minibatches=minibatches, spans=waits.attributed(), replicas=replicas)
    warm = warm_up(times) if len(times) and times.step.min() == first else times.step[:0]
    counted = ~np.isin(times.step, warm)
    counted_times, counted_own = times.where(counted), np.isin(own.step, times.step[counted])

    # Findings, over the steps that count.
    overall = _overall(counted_times, splits, counted_own, described) if counted.any() else None
    pipelines = describe_pipelines(splits, own, tasks, counted_own, described, placements)
    window = _after(warm, steps, times)
    layer_times = with_weights(run.layer_times(window), all_tasks, window)
    layers = layer_reports(layer_times, [layer for pipeline in described for layer in pipeline.layers])
    links = find_links(
        own.where(counted_own & (own.kind != INCOMPLETE)), tasks, transfers, counted_times, run.description
    )
    measured = None
    if overall is not None and len(pipelines) == 1 and (main := _main(splits, own, counted_own)) is not None:
        measured = measure_steps(
            run,
            pipelines[0].facts,
            main,
            own,
            tasks,
            times=counted_times,
            bubble=overall.bubble,
            layers=layer_times,
            transfers=transfers,
            processors=placements[pipelines[0].partitions].processors,
        )
    stragglers = find_stragglers(partition_times(splits, own, tasks, counted_own, replicas))
    held = waits.held(counted_times)
    verdict = with_waits(_verdict(overall, pipelines, measured, links, counted_times), held)
    # Statistics are read before the remarks are taken: reading them may leave some.
    nonfinite = first_nonfinite(run.statistics(words=NONFINITE_KEYS), layers=[entry.name for entry in layers])
    return Report(
        **_identity(run),
        replicas=replicas,
        remarks=(
            *remarks_on(run, own, spans),
            *remarks_on_clocks(run, tasks),
            *remarks_on_bubble(overall, counted_times),
        ),
        verdict=with_ending(verdict, run),
        measured=measured,
        overall=overall,
        left=ExcludedSteps(tuple(warm.tolist()), int((~found.complete).sum())),
        pipelines=_narrowed_pipelines(pipelines, partition),
        steps=times,
        counted=counted,
        evaluations=int((minibatches.kind == EVALUATION).sum()) if (minibatches.kind != EVALUATION).any() else 0,
        layers=_narrowed_layers(layers, partition, layer),
        stragglers=tuple(entry for entry in stragglers if partition in (None, entry.partition)),
        links=tuple(link for link in links if partition is None or partition in link.partitions),
        held=held,
        collectives=name_collectives(calls, times.step[counted]),
        nonfinite=nonfinite,
        minibatches=minibatches,
        tasks=tasks,
    )


def measure(run: Run, *, link: Link | None = None) -> Measured:
    """Read what a run took, as `pipesight.report.analyse` measures it.

    Args:
        run: An open one.
        link: The way between devices that plans are to have; by default as fast as it was.

    Raises:
        NoTasksError: No mini-batch went through a pipeline, and back, as a whole.
    """
    report = analyse(run)
    found = report.measured
    if found is None:
        what = "no task order that can be simulated" if report.overall is not None else "no complete training step"
        if not len(report.tasks):
            what = "no pipeline tasks"
        elif not report.trained:
            what = "no mini-batch with all its forwards and backwards"
        raise NoTasksError(f"the run has {what} ({run.path}); record at least one complete training step of a pipeline")
    return found if link is None else replace(found, costs=replace(found.costs, link=link))


def _identity(run: Run) -> dict[str, Any]:
    """Return the fields of a report that say which run it is."""
    return {
        "path": str(run.path),
        "description": run.description,
        "events": run.events,
        "attempt": run.attempt.number,
        "attempts": run.attempt.there,
        "ranks": tuple(run.ranks()),
    }


def _without_tasks(run: Run) -> Report:
    """Say where the time of a trace went that has no pipeline in it."""
    times = run.names()
    rows = zip(times.category.tolist(), times.name.tolist(), times.count.tolist(), times.total.tolist(), strict=True)
    entries = [NameTime(str(c), str(n), int(k), int(t)) for c, n, k, t in rows if c != ENVELOPE]
    nonfinite = first_nonfinite(run.statistics(words=NONFINITE_KEYS))
    text = (
        "The bubble cannot be computed: the trace has no pipeline tasks, which are spans of category compute, named "
        "forward or backward, with a partition and a micro-batch."
    )
    return Report(
        **_identity(run),
        remarks=tuple(remarks_on(run)),
        verdict=with_ending(Verdict(text, ()), run),
        nonfinite=nonfinite,
        names=tuple(entries[:NAMES]),
    )


def _splits(
    minibatches: MiniBatchTable, tasks: Tasks, transfers: Transfers, placements: Mapping[int, Placement]
) -> list[WindowSplit]:
    """Split the windows of complete mini-batches; rows are those of ``minibatches``."""
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


def _chosen(found: StepTable, steps: range | None) -> StepTable:
    if steps is None:
        return found
    rows = np.isin(found.step, np.array(steps)) if len(steps) else np.zeros(len(found), bool)
    if not rows.any():
        there = f"{found.step.min()} to {found.step.max()}" if len(found) else "none"
        raise ValueError(f"none of these steps was recorded (requested: {_range(steps)}, recorded: {there})")
    return found.where(rows)


def _range(steps: range) -> str:
    return f"{steps.start}:{steps.stop - 1}" if len(steps) != 1 else f"{steps.start}"


def _of_steps(minibatches: MiniBatchTable, steps: StepTable) -> tuple[MiniBatchTable, StepTable]:
    """Keep the mini-batches of some steps."""
    if int(steps.count.sum()) == len(minibatches):
        return minibatches, steps
    first = np.cumsum(steps.count) - steps.count
    return minibatches.where(steps.members()), StepTable(**{**steps.columns(), "first": first})


def _after(warm: Column, steps: range | None, times: StepTimes) -> range | None:
    """Return the steps that count."""
    if not len(warm):
        return steps
    later = range(int(warm[-1]) + 1, int(times.step.max()) + 1)
    return later if steps is None else range(max(later.start, steps.start), steps.stop)


def _overall(
    chosen: StepTimes, splits: Sequence[WindowSplit], own: Column, described: Sequence[DescribedPipeline]
) -> Overall:
    time = summary(chosen.period)
    replicas = len(np.unique(chosen.replica))
    steps = len(np.unique(chosen.step))
    elapsed = float(np.bincount(chosen.replica, chosen.period).max())
    batch = {pipeline.batch_size for pipeline in described}
    samples = None
    if len(batch) == 1 and (size := batch.pop()) is not None:
        samples = size * float(chosen.minibatches.sum()) / elapsed * 1e6
    phases = np.sum([split.phases[:, own[split.rows]].sum(axis=(1, 2)) for split in splits], axis=0)
    return Overall(
        steps=steps,
        replicas=replicas,
        time=time,
        elapsed=elapsed,
        steps_per_second=steps / elapsed * 1e6,
        samples_per_second=samples,
        microbatches_per_second=float(chosen.microbatches.sum()) / elapsed * 1e6,
        bubble=float((chosen.bubble * chosen.window).sum() / max(chosen.window.sum(), 1)),
        bubbles=summary(chosen.bubble),
        bound=float((chosen.bound * chosen.window).sum() / max(chosen.window.sum(), 1)),
        recompute=float(phases[1] / max(phases.sum(), 1)),
        parts={name: float(part.mean()) for name, part in zip(PARTS, chosen.parts, strict=True)},
        turnaround=float(chosen.turnaround.mean()),
        spreads={name: summary(part) for name, part in zip(PARTS, chosen.parts, strict=True)},
    )


def _main(splits: Sequence[WindowSplit], minibatches: MiniBatchTable, counted: Column) -> WindowSplit | None:
    """Return the mini-batches of training that most time went to, of those that count and have the same tasks."""
    there = [split.where(np.flatnonzero(counted[split.rows])) for split in splits]
    trained = [s for s in there if len(s.rows) and minibatches.kind[s.rows[0]] == TRAINING]
    return max(trained, key=lambda split: int(split.window.sum()), default=None)


def _verdict(
    overall: Overall | None,
    pipelines: Sequence[PipelineReport],
    measured: Measured | None,
    links: Sequence[LinkReport],
    times: StepTimes,
) -> Verdict:
    if overall is None or not pipelines:
        return Verdict("No step is complete, so the bubble cannot be computed.", ())
    pipeline = pipelines[0]
    # The last step ends with what it did last, so that what comes before the next is missing.
    whole = times.where(times.follows.astype(bool)) if times.follows.any() else times
    situation = Situation(
        facts=pipeline.facts,
        measured=measured,
        period=float(whole.period.mean()),
        parts={name: float(part.mean()) for name, part in zip(PARTS, whole.parts, strict=True)},
        turnaround=float(whole.turnaround.mean()),
        links=links,
    )
    return verdict_on(
        bubble=overall.bubble,
        bound=overall.bound,
        partitions=pipeline.partitions,
        chunks=pipeline.chunks,
        workers=pipeline.workers,
        devices=pipeline.devices,
        device_idle=pipeline.device_idle,
        on_processors=pipeline.on_processors,
        processors=pipeline.facts.processors,
        parts=overall.parts,
        changes=find_changes(situation) if len(pipelines) == 1 else (),
    )


def _narrowed_pipelines(pipelines: Sequence[PipelineReport], partition: int | None) -> tuple[PipelineReport, ...]:
    if partition is None:
        return tuple(pipelines)
    most = max((pipeline.partitions for pipeline in pipelines), default=0)
    if not 0 <= partition < most:
        raise ValueError(f"there is no partition {partition} (partitions: 0 to {most - 1})")
    return tuple(pipeline.only(partition) for pipeline in pipelines)


def _narrowed_layers(layers: Sequence[LayerReport], partition: int | None, name: str | None) -> tuple[LayerReport, ...]:
    chosen = [entry for entry in layers if partition in (None, entry.partition)]
    if name is not None:
        chosen = [entry for entry in chosen if fnmatch.fnmatchcase(entry.name, name)]
        if not chosen:
            known = ", ".join(entry.name for entry in layers[:8]) + (", ..." if len(layers) > 8 else "")
            raise ValueError(f"no layer is named {name!r} (layers: {known or 'none'})")
    return tuple(chosen)
