"""From the events of a run to its report: the analysis, step by step. `analyse` is the way through this package."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesight._plurals import count_of
from pipesight.analysis.advice import Situation, find_changes
from pipesight.analysis.batch_sizes import of_usual_size, with_common_samples
from pipesight.analysis.collectives import background_calls, match_calls, name_collectives, waits_in
from pipesight.analysis.critical_path import following, paths_through
from pipesight.analysis.curves import curves_of, moments_of
from pipesight.analysis.described_pipelines import pipelines_of, replicas_in
from pipesight.analysis.gpu_times import gpu_times, profiled_steps
from pipesight.analysis.layer_times import LayerReport, layer_reports, with_weights
from pipesight.analysis.logged_steps import logged_curves, logged_steps, remarks_on_log, verdict_on_log
from pipesight.analysis.measured_costs import Measured, measure_steps
from pipesight.analysis.memory import memory_of
from pipesight.analysis.nonfinite import first_nonfinite
from pipesight.analysis.overall import overall_of
from pipesight.analysis.own_spans import own_times, pipeline_edges
from pipesight.analysis.pace_change import pace_change
from pipesight.analysis.pipeline_report import PipelineReport, describe_pipelines, partition_times
from pipesight.analysis.pipelining_lead import pipelining_lead
from pipesight.analysis.process_stops import stops_in
from pipesight.analysis.program_advice import NOT_ANNOTATED, program_changes, program_verdict
from pipesight.analysis.program_report import own_spans_of, program_report
from pipesight.analysis.program_time import is_own
from pipesight.analysis.rank_links import find_links
from pipesight.analysis.rank_waits import RankWaits
from pipesight.analysis.recorded_operations import RecordedOperations, recorded_operations
from pipesight.analysis.report import ExcludedSteps, NameTime, Report
from pipesight.analysis.run_remarks import (
    Remark,
    remarks_on,
    remarks_on_bubble,
    remarks_on_clocks,
    remarks_on_measuring,
    remarks_on_memory,
    remarks_on_program,
    remarks_on_samples,
    remarks_on_simulation,
    with_ending,
    with_losses,
    with_waits,
)
from pipesight.analysis.step_grouping import (
    EVALUATION,
    INCOMPLETE,
    MiniBatchTable,
    find_minibatches,
    forward_only,
    replicas_of,
)
from pipesight.analysis.stragglers import find_stragglers
from pipesight.analysis.timed_steps import time_steps
from pipesight.analysis.verdict import Verdict, verdict_on
from pipesight.analysis.what_if import WhatIf, what_if
from pipesight.analysis.whole_steps import whole_steps
from pipesight.runs.reading.stats_and_logs import NONFINITE_KEYS

if TYPE_CHECKING:
    from pipesight.runs.reading.event_tables import Operations
    from pipesight.runs.reading.megatron_log import TrainingLog
    from pipesight.runs.reading.run import Run
    from pipesight.schedule.costs import Link

__all__ = ["NoTasksError", "analyse", "measure"]

NAMES = 30
"""How many span names a report lists for a trace without tasks."""
ENVELOPE = "Trace"
"""The category of the span that PyTorch's profiler puts around all others."""


class NoTasksError(ValueError):
    """A run has nothing to plan by."""


def analyse(
    run: Run, *, steps: range | None = None, partition: int | None = None, layer: str | None = None, advice: bool = True
) -> Report:
    """Analyse a run.

    Args:
        run: What `open_run` returns.
        steps: Only these.
        partition: Report the bubble, layers, stragglers and links of this one alone.
        layer: Report only layers of this name; ``*`` matches any part of one.
        advice: Find changes to advise, and the critical path, which takes most of the time.

    Raises:
        TypeError: It is no run.
        ValueError: There is no such step, partition or layer.
    """
    if isinstance(run, (str, os.PathLike)):
        raise TypeError(f"analyse takes a run that is open: analyse(open_run({os.fspath(run)!r}))")
    if (operations := run.operations()) is not None:
        return _of_operations(run, operations, steps, partition, layer)
    if (log := run.training_log()) is not None:
        return _of_log(run, log, steps, partition, layer)
    described = pipelines_of(run.description)
    all_tasks, spans, transfers = run.tasks(), run.spans(), run.transfers()
    replicas = replicas_of(all_tasks, replicas_in(described))
    sizes = {pipeline.partitions for pipeline in described}
    minibatches, tasks = find_minibatches(all_tasks, partitions=sizes, replicas=replicas)
    if not len(tasks):
        return _without_tasks(run, steps)
    described = of_usual_size(described, minibatches)
    unknown = remarks_on_samples(described, minibatches)
    minibatches = with_common_samples(described, minibatches)
    calls = match_calls(run.communications(), run.description)
    waits = RankWaits(waits_in(calls), spans, minibatches, replicas)
    timed = time_steps(
        minibatches, tasks, spans, transfers, described=described, replicas=replicas, waits=waits, only=steps
    )

    # Findings, over the steps that count.
    counted, own = timed.counted_times, timed.minibatches
    overall = overall_of(counted, timed.splits, timed.counted_minibatches) if len(counted) else None
    pipelines = describe_pipelines(timed, tasks, described)
    trained = run.layer_times(timed.counted_range, without=forward_only(minibatches, tasks))
    layer_times = with_weights(trained, all_tasks, timed.counted_range)
    layers = layer_reports(layer_times, [layer for pipeline in described for layer in pipeline.layers])
    complete = own.where(timed.counted_minibatches & (own.kind != INCOMPLETE))
    links = find_links(complete, tasks, transfers, counted, run.description)
    points, edges = run.points(), pipeline_edges(minibatches, tasks, replicas)
    memory = memory_of(points, edges)
    stops = stops_in(points)

    def operations_of(minibatches: MiniBatchTable) -> RecordedOperations | None:
        return recorded_operations(minibatches, tasks, transfers, spans, calls, timed.placements, counted, stops)

    replays, doubts = _replayed(operations_of(complete))
    pace = None
    if run.followed:
        pace = pace_change(counted, lambda steps: operations_of(complete.where(np.isin(complete.step, steps))))
    measured, changes = None, []
    if advice and overall is not None and len(pipelines) == 1:
        facts = pipelines[0].facts
        measured = measure_steps(
            run, facts, timed, tasks, bubble=overall.bubble, layers=layer_times, transfers=transfers, memory=memory
        )
        changes = find_changes(Situation.of(counted, facts=facts, measured=measured, links=links, replays=replays))
    stragglers = [
        straggler
        for straggler in find_stragglers(partition_times(timed, tasks, replicas))
        if replays is None or replays.slows(straggler.rank, straggler.partition)
    ]
    held = waits.held(counted)
    program = run.program()
    own_spans = program.where(is_own(program))
    curves = curves_of(points, edges)
    # Statistics are read before the remarks are taken: reading them may leave some.
    nonfinite = first_nonfinite(run.statistics(words=NONFINITE_KEYS), layers=[entry.name for entry in layers])
    verdict = with_losses(
        with_waits(verdict_on(overall, pipelines, changes, slowed=replays is not None and bool(replays.causes)), held),
        curves,
        watched=nonfinite is not None,
    )
    report = Report(
        **_identity(run),
        replicas=replicas,
        remarks=(
            *remarks_on(run, own, spans),
            *unknown,
            *remarks_on_clocks(run, tasks),
            *remarks_on_bubble(overall, counted),
            *remarks_on_measuring(run, counted),
            *remarks_on_simulation(measured, changes),
            *remarks_on_memory(points, measured),
            *doubts,
        ),
        verdict=with_ending(verdict, run),
        measured=measured,
        overall=overall,
        left=ExcludedSteps(tuple(timed.warm_up.tolist()), timed.incomplete),
        pipelines=_narrowed_pipelines(pipelines, partition),
        steps=timed.times,
        counted=timed.counted,
        evaluations=int((minibatches.kind == EVALUATION).sum()) if (minibatches.kind != EVALUATION).any() else 0,
        layers=_narrowed_layers(layers, partition, layer),
        stragglers=tuple(entry for entry in stragglers if partition in (None, entry.partition)),
        links=tuple(link for link in links if partition is None or partition in link.partitions),
        what_if=replays,
        pace=pace,
        held=held,
        collectives=name_collectives(calls, counted.step),
        nonfinite=nonfinite,
        minibatches=minibatches,
        tasks=tasks,
        own=own_spans,
        own_spans=own_spans_of(own_spans),
        own_times=own_times(own_spans, counted, minibatches=minibatches, tasks=tasks, spans=spans, replicas=replicas),
        curves=curves,
        moments=moments_of(points, edges),
        memory=memory,
    )
    if not advice or (typical := report.typical) is None:
        return report
    next_of = following(timed.times)
    drawn = operations_of(complete.where(np.isin(complete.step, [typical, next_of.get(typical, typical)])))
    path = None if drawn is None else paths_through(drawn, [typical], next_of).get(typical)
    return replace(report, critical_path=path)


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
        remedy = "record at least one complete training step of a pipeline"
        if report.program is not None:
            remedy += ", or plan a model that is not one yet: pipesight plan --model MODULE:FACTORY"
        raise NoTasksError(f"the run has {what} ({run.path}); {remedy}")
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
        # A run of ours has no kernels, and may have millions of events to search for them.
        "gpus": () if run.description else gpu_times(run.kernels()),
        "profiled": () if run.description else profiled_steps(run.profiler_steps()),
    }


def _without_tasks(run: Run, steps: range | None) -> Report:
    """Report a program without a pipeline or, of a trace that has no steps either, where its time went."""
    spans = run.program()
    communications = run.communications()
    calls = match_calls(communications, run.description)
    program = program_report(
        spans,
        only=steps,
        on_device=run.uses_devices(),
        background=background_calls(communications),
        waits=waits_in(calls),
    )
    if program is not None:
        changes = program_changes(program, run.description)
        points = run.points()
        curves = curves_of(points, program.edges())
        nonfinite = first_nonfinite(run.statistics(words=NONFINITE_KEYS))
        verdict = with_waits(program_verdict(program, changes, run), program.waits.held)
        return Report(
            **_identity(run),
            remarks=(*remarks_on(run), *remarks_on_program(program), *remarks_on_memory(points)),
            verdict=with_losses(verdict, curves, watched=nonfinite is not None),
            nonfinite=nonfinite,
            left=ExcludedSteps(program.warm_up),
            program=program,
            lead=pipelining_lead(program, run.description),
            held=program.waits.held,
            collectives=name_collectives(calls, program.steps.where(program.counted).step),
            own_spans=own_spans_of(spans),
            curves=curves,
            moments=moments_of(points, program.edges()),
            memory=memory_of(points, program.edges()),
        )
    times = run.names()
    rows = zip(times.category.tolist(), times.name.tolist(), times.count.tolist(), times.total.tolist(), strict=True)
    entries = [NameTime(str(c), str(n), int(k), int(t)) for c, n, k, t in rows if c != ENVELOPE]
    nonfinite = first_nonfinite(run.statistics(words=NONFINITE_KEYS))
    text = (
        "The bubble cannot be computed: the trace has no pipeline tasks, which are spans of category compute, named "
        "forward or backward, with a partition and a micro-batch."
    )
    if run.profiled_schedule:
        text = NOT_ANNOTATED
    return Report(
        **_identity(run),
        remarks=tuple(remarks_on(run)),
        verdict=with_ending(Verdict(text, ()), run),
        nonfinite=nonfinite,
        names=tuple(entries[:NAMES]),
    )


def _replayed(recorded: RecordedOperations | None) -> tuple[WhatIf | None, list[Remark]]:
    """Replay a recorded run, and say what is in doubt."""
    if recorded is None:
        return None, []
    try:
        found = what_if(
            recorded.operations, recorded.partition_of_worker, recorded=recorded.recorded, chunks=recorded.chunks
        )
    except ValueError as error:
        return None, [Remark(None, f"what if there were no stragglers is not known: {error}")]
    if found.steps < recorded.steps:
        few = f"{found.steps:,} of {recorded.steps:,} steps were replayed, evenly chosen"
        found = replace(found, remarks=(*found.remarks, few))
    return found, []


def _of_operations(
    run: Run, operations: Operations, steps: range | None, partition: int | None, layer: str | None
) -> Report:
    """Say what slows a job of which only the operations are known."""
    _refuse_narrowing("a trace of operations", partition, layer)
    if steps is not None:
        there = run.steps()
        operations = operations.where((operations.step >= steps.start) & (operations.step < steps.stop))
        if not len(operations):
            last = steps.stop - 1
            raise ValueError(f"no step from {steps.start} to {last} was recorded (steps: {there[0]} to {there[-1]})")
    recorded, whole = len(np.unique(operations.step)), whole_steps(operations)
    if not len(whole):
        raise ValueError(
            f"no step of the trace is complete (steps: {recorded}); every worker needs one forward and one backward "
            "for each of its micro-batches, and the same collectives in each step"
        )
    remarks = remarks_on(run)
    if len(whole) < recorded:
        operations = operations.where(np.isin(operations.step, whole))
        left = recorded - len(whole)
        remarks.append(Remark(None, f"{count_of(left, 'incomplete step')} of {recorded:,} left out of the replays"))
    found = what_if(operations)
    return Report(
        **_identity(run),
        remarks=tuple(remarks),
        verdict=Verdict(found.verdict, ()),
        what_if=found,
    )


def _of_log(run: Run, log: TrainingLog, steps: range | None, partition: int | None, layer: str | None) -> Report:
    """Say what a training log of Megatron-LM holds."""
    _refuse_narrowing("a training log", partition, layer)
    if steps is not None:
        kept = [entry for entry in log.iterations if steps.start <= entry.number < steps.stop]
        if not kept:
            first, last = log.iterations[0].number, log.iterations[-1].number
            asked = f"{steps.start} to {steps.stop - 1}"
            raise ValueError(f"no line is about iterations {asked} (iterations: {first} to {last})")
        log = replace(log, iterations=kept)
    logged, curves = logged_steps(log), logged_curves(log)
    return Report(
        **_identity(run),
        remarks=(*remarks_on(run), *remarks_on_log(logged, log)),
        verdict=with_losses(verdict_on_log(logged), curves),
        logged=logged,
        curves=curves,
    )


def _refuse_narrowing(what: str, partition: int | None, layer: str | None) -> None:
    if partition is not None or layer is not None:
        part = f"partition {partition}" if partition is not None else f"layer {layer!r}"
        raise ValueError(f"{what} cannot be narrowed to {part}; leave --partition and --layer out")


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
