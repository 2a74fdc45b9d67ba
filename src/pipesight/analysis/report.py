"""A run, analysed: how long its steps take, how large the bubble is and why, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesight.analysis.advice import Situation, find_changes
from pipesight.analysis.bubble import Split, split_windows
from pipesight.analysis.collectives import Collective, find_meetings, name_collectives, waits_in
from pipesight.analysis.described_pipelines import (
    PipelineFacts,
    device_of_partition,
    is_over_ranks,
    pipelines_of,
    rank_of_partition,
    replicas_in,
)
from pipesight.analysis.layer_times import Layer, layers_of, with_weights
from pipesight.analysis.measured_costs import Measured, measure_steps
from pipesight.analysis.nonfinite import NonFinite, first_nonfinite
from pipesight.analysis.partition_placement import workers_of
from pipesight.analysis.pipeline_report import PipelineReport, describe_pipelines, lanes_of
from pipesight.analysis.rank_links import Link, find_links
from pipesight.analysis.rank_waits import Held, Waits
from pipesight.analysis.remarks import Remark, doubts_about, remarks_on, with_ending, with_waits
from pipesight.analysis.step_breakdown import PARTS, StepTimes, Summary, break_down, summary, warm_up
from pipesight.analysis.step_grouping import (
    EVALUATION,
    INCOMPLETE,
    TRAINING,
    MiniBatches,
    Steps,
    find_minibatches,
    find_steps,
    replicas_of,
)
from pipesight.analysis.stragglers import Straggler, find_stragglers
from pipesight.analysis.verdict import Verdict, verdict_on
from pipesight.runs.reading.event_tables import Column, Tasks
from pipesight.runs.reading.stats_and_logs import NONFINITE_KEYS

if TYPE_CHECKING:
    from pipesight.runs.reading.run import Run

__all__ = ["Left", "NameTime", "Overall", "Remark", "Report", "analyse"]

NAMES = 30
"""How many names a report has of a trace without tasks."""
ENVELOPE = "Trace"
"""The category of the span that PyTorch's profiler puts around all others."""


@dataclass(frozen=True, slots=True)
class NameTime:
    """All spans of one name, in microseconds."""

    category: str
    """As the trace has it, such as `compute`."""
    name: str
    """Of the spans."""
    count: int
    """How many there are."""
    total: int
    """Time in them, nested spans included."""


@dataclass(frozen=True, slots=True)
class Left:
    """Steps that are no part of the overall numbers."""

    warm_up: tuple[int, ...]
    """Numbers of the first steps, which are slower than the rest."""
    incomplete: int
    """Steps of which tasks are missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Overall:
    """The steps, all together; times in microseconds."""

    steps: int
    """How many are counted."""
    replicas: int
    """That each of them ran in; numbers are over all of these."""
    time: Summary
    """Of a step."""
    elapsed: float
    """What the steps took, all together, with all pauses between them; of several replicas, the slowest."""
    steps_per_second: float
    """Steps over ``elapsed``; so are samples and micro-batches."""
    samples_per_second: float | None
    """`None` if the number of samples was not recorded."""
    microbatches_per_second: float
    """Over all replicas."""
    bubble: float
    """The share of windows in which partitions do not compute, or ranks that have several; over all of them."""
    bubbles: Summary
    """The same, step by step."""
    bound: float
    """The bubble that the schedule itself has, over all windows too."""
    recompute: float
    """The share of computing that is recomputation."""
    parts: Mapping[str, float]
    """Of the mean step; they add up to ``time.mean``."""
    turnaround: float
    """Of the host gaps in it, what lies between forward and backward, as for the loss."""
    spreads: Mapping[str, Summary]
    """Of the parts, step by step."""


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What there is to say about a run. Times are microseconds, shares are of 1."""

    path: str
    """The run directory or trace."""
    description: Mapping[str, Any]
    """What `run.json` says; empty for a bare trace."""
    events: int
    """How many were read."""
    attempt: int
    """Of a run that was restarted, counting from 0."""
    attempts: tuple[int, ...]
    """Those that left a trace."""
    ranks: tuple[int, ...]
    """Those that were read."""
    replicas: Mapping[int, int]
    """That each rank with tasks belongs to."""
    remarks: tuple[Remark, ...]
    """What is missing, damaged or doubtful in the files."""
    verdict: Verdict
    """The first lines of the report, and its advice."""
    overall: Overall | None
    """``None`` if there is no step to speak of."""
    left: Left
    """Steps excluded from `overall`."""
    pipelines: tuple[PipelineReport, ...]
    """One for each number of partitions that ran."""
    measured: Measured | None = field(repr=False)
    """What plans are made of; ``None`` if there is nothing to plan by."""
    steps: StepTimes = field(repr=False)
    """Complete steps, those of the warm-up included."""
    counted: Column = field(repr=False)
    """Which of them make up ``overall``."""
    evaluations: int
    """Mini-batches without a backward."""
    layers: tuple[Layer, ...]
    """In the order of the model."""
    stragglers: tuple[Straggler, ...]
    """Partitions that are slower on one rank than on others, or at times."""
    links: tuple[Link, ...]
    """Between ranks, those that cost most first."""
    held: tuple[Held, ...]
    """Ranks that keep others waiting in collectives, those that cost most first."""
    collectives: tuple[Collective, ...]
    """Of the main threads, those that take longest first."""
    nonfinite: NonFinite | None
    """The first tensor with NaN or Inf, if statistics were recorded and there was one."""
    names: tuple[NameTime, ...]
    """Where the time went, of a trace that has no tasks."""
    minibatches: MiniBatches = field(repr=False)
    """All that were found, incomplete ones too."""
    tasks: Tasks = field(repr=False)
    """Those of the mini-batches, in their order."""

    @property
    def taking_turns(self) -> frozenset[int]:
        """Ranks that have several partitions and compute for one at a time: the bubble is theirs, not a partition's."""
        shared = [pipeline for pipeline in self.pipelines if pipeline.workers < pipeline.partitions]
        return frozenset(rank for pipeline in shared for row in pipeline.rows for rank in row.ranks)

    @property
    def trained(self) -> bool:
        """Whether a mini-batch has all its forwards and backwards."""
        return bool((self.minibatches.kind == TRAINING).any())

    @property
    def typical(self) -> int | None:
        """A step like most: of the tenth whose times are closest to the median, the one whose bubble is."""
        rows = np.flatnonzero(self.counted)
        if self.overall is None or not len(rows):
            return None
        nearest = np.argsort(np.abs(self.steps.period[rows] - self.overall.time.median), kind="stable")
        rows = rows[nearest[: -(-len(rows) // 10)]]
        return int(self.steps.step[rows[np.argmin(np.abs(self.steps.bubble[rows] - self.overall.bubbles.median))]])


def analyse(run: Run, *, steps: range | None = None, partition: int | None = None, layer: str | None = None) -> Report:
    """Analyse a run.

    Args:
        run: What `open_run` returns.
        steps: Only these.
        partition: Tell only of this one's bubble, layers and so on.
        layer: Tell only of the layers of this name; ``*`` stands for any part of one.

    Raises:
        ValueError: There is no such step, partition or layer.
    """
    facts = pipelines_of(run.description)
    all_tasks = run.tasks()
    replicas = replicas_of(all_tasks, replicas_in(facts))
    sizes = {fact.partitions for fact in facts}
    minibatches, tasks = find_minibatches(all_tasks, partitions=sizes, replicas=replicas)
    if not len(tasks):
        return _without_tasks(run)
    spans = run.spans()
    found, own = find_steps(minibatches, spans, replicas)
    first = int(found.step.min()) if len(found) else 0
    found = _chosen(found, steps)
    own, found = _of_steps(own, found)
    complete = own.where(own.kind != INCOMPLETE)
    homes = {n: device_of_partition(_facts(facts, n), tasks, n) for n in np.unique(complete.partitions).tolist()}
    workers = {n: _workers(_facts(facts, n), complete.where(complete.partitions == n), tasks, n) for n in homes}
    transfers = run.transfers()
    processors = {n: _processors(_facts(facts, n), complete.where(complete.partitions == n)) for n in homes}
    splits = split_windows(
        complete,
        tasks,
        transfers,
        devices=homes.__getitem__,
        workers=workers.__getitem__,
        processors=processors.__getitem__,
    )
    whole = np.flatnonzero(own.kind != INCOMPLETE)
    splits = [_renumbered(split, whole) for split in splits]
    meetings = find_meetings(run.communications(), run.description)
    waits = Waits(waits_in(meetings), spans, minibatches, replicas)
    did = waits.attributed()
    times = break_down(found, own, splits, all_minibatches=minibatches, spans=did, replicas=replicas)
    warm = warm_up(times) if len(times) and times.step.min() == first else times.step[:0]
    counted = ~np.isin(times.step, warm)
    counted_minibatches = np.isin(own.step, times.step[counted])
    overall = _overall(times, counted, splits, counted_minibatches, facts) if counted.any() else None
    pipelines = describe_pipelines(splits, own, tasks, counted_minibatches, facts, homes, workers)
    window = _after(warm, steps, times)
    layer_times = with_weights(run.layer_times(window), all_tasks, window)
    layers = layers_of(layer_times, _layer_facts(facts))
    names = [entry.name for entry in layers]
    there = own.where(counted_minibatches & (own.kind != INCOMPLETE))
    links = find_links(there, tasks, transfers, times.where(counted), run.description)
    measured = None
    if overall is not None and len(pipelines) == 1 and (main := _main(splits, own, counted_minibatches)) is not None:
        measured = measure_steps(
            run,
            pipelines[0].facts,
            main,
            own,
            tasks,
            times=times.where(counted),
            bubble=overall.bubble,
            layers=layer_times,
            transfers=transfers,
            processors=processors[pipelines[0].partitions],
        )
    nonfinite = first_nonfinite(run.statistics(words=NONFINITE_KEYS), layers=names)  # before remarks: it finds some
    held = waits.held(times.where(counted))
    return Report(
        path=str(run.path),
        description=run.description,
        events=run.events,
        attempt=run.attempt.number,
        attempts=run.attempt.there,
        ranks=tuple(run.ranks()),
        replicas=replicas,
        remarks=(*remarks_on(run, own, spans), *doubts_about(run, tasks)),
        verdict=with_ending(with_waits(_verdict(overall, pipelines, measured, links, times.where(counted)), held), run),
        measured=measured,
        overall=overall,
        left=Left(tuple(warm.tolist()), int((~found.complete).sum())),
        pipelines=_narrowed_pipelines(pipelines, partition),
        steps=times,
        counted=counted,
        evaluations=int((minibatches.kind == EVALUATION).sum()) if (minibatches.kind != EVALUATION).any() else 0,
        layers=_narrowed_layers(layers, partition, layer),
        stragglers=tuple(
            straggler
            for straggler in find_stragglers(lanes_of(splits, own, tasks, counted_minibatches, replicas))
            if partition in (None, straggler.partition)
        ),
        links=tuple(link for link in links if partition is None or partition in link.partitions),
        held=held,
        collectives=name_collectives(meetings, times.step[counted]),
        nonfinite=nonfinite,
        names=(),
        minibatches=minibatches,
        tasks=tasks,
    )


def _without_tasks(run: Run) -> Report:
    """Say where the time of a trace went that has no pipeline in it."""
    times = run.names()
    rows = zip(times.category.tolist(), times.name.tolist(), times.count.tolist(), times.total.tolist(), strict=True)
    entries = [NameTime(str(c), str(n), int(k), int(t)) for c, n, k, t in rows if c != ENVELOPE]
    nothing = np.zeros(0, np.int64)
    nonfinite = first_nonfinite(run.statistics(words=NONFINITE_KEYS))
    text = (
        "The bubble cannot be computed: the trace has no pipeline tasks, which are spans of category compute, named "
        "forward or backward, with a partition and a micro-batch."
    )
    return Report(
        path=str(run.path),
        description=run.description,
        events=run.events,
        attempt=run.attempt.number,
        attempts=run.attempt.there,
        ranks=tuple(run.ranks()),
        replicas={},
        remarks=tuple(remarks_on(run)),
        verdict=with_ending(Verdict(text, ()), run),
        overall=None,
        left=Left((), 0),
        pipelines=(),
        measured=None,
        steps=StepTimes.none(),
        counted=np.zeros(0, bool),
        evaluations=0,
        layers=(),
        stragglers=(),
        links=(),
        held=(),
        collectives=(),
        nonfinite=nonfinite,
        names=tuple(entries[:NAMES]),
        minibatches=MiniBatches(*[nothing] * 9),
        tasks=Tasks(*[nothing] * 8),
    )


def _chosen(found: Steps, steps: range | None) -> Steps:
    if steps is None:
        return found
    rows = np.isin(found.step, np.array(steps)) if len(steps) else np.zeros(len(found), bool)
    if not rows.any():
        there = f"{found.step.min()} to {found.step.max()}" if len(found) else "none"
        raise ValueError(f"none of these steps was recorded (requested: {_range(steps)}, recorded: {there})")
    return found.where(rows)


def _range(steps: range) -> str:
    return f"{steps.start}:{steps.stop - 1}" if len(steps) != 1 else f"{steps.start}"


def _of_steps(minibatches: MiniBatches, steps: Steps) -> tuple[MiniBatches, Steps]:
    """Keep the mini-batches of some steps."""
    if int(steps.count.sum()) == len(minibatches):
        return minibatches, steps
    first = np.cumsum(steps.count) - steps.count
    return minibatches.where(steps.members()), Steps(**{**steps.columns(), "first": first})


def _after(warm: Column, steps: range | None, times: StepTimes) -> range | None:
    """Return the steps that count."""
    if not len(warm):
        return steps
    later = range(int(warm[-1]) + 1, int(times.step.max()) + 1)
    return later if steps is None else range(max(later.start, steps.start), steps.stop)


def _facts(facts: Sequence[PipelineFacts], partitions: int) -> PipelineFacts | None:
    return next((fact for fact in facts if fact.partitions == partitions), None)


def _workers(fact: PipelineFacts | None, minibatches: MiniBatches, tasks: Tasks, partitions: int) -> Sequence[int]:
    ranks = rank_of_partition(tasks, partitions)
    return workers_of(ranks, minibatches, tasks) if is_over_ranks(fact, ranks) else range(partitions)


def _layer_facts(facts: Sequence[PipelineFacts]) -> list[Any]:
    return [layer for fact in facts for layer in fact.layers]


def _renumbered(split: Split, rows: Column) -> Split:
    return replace(split, rows=rows[split.rows])


def _overall(
    times: StepTimes, counted: Column, splits: Sequence[Split], own: Column, facts: Sequence[PipelineFacts]
) -> Overall:
    chosen = times.where(counted)
    time = summary(chosen.period)
    replicas = len(np.unique(chosen.replica))
    steps = len(np.unique(chosen.step))
    elapsed = float(np.bincount(chosen.replica, chosen.period).max())
    batch = {fact.batch_size for fact in facts}
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


def _processors(fact: PipelineFacts | None, minibatches: MiniBatches) -> int | None:
    """Return how many processors the partitions of a replica share, if all compute on the CPU of one machine."""
    if fact is None or fact.processors is None or not fact.devices:
        return None
    if not all(name.startswith("cpu") for name in fact.devices):
        return None
    return max(1, fact.processors // max(1, len(np.unique(minibatches.replica))))


def _main(splits: Sequence[Split], minibatches: MiniBatches, counted: Column) -> Split | None:
    """Return the mini-batches of training that most time went to, of those that count and have the same tasks."""
    there = [split.where(np.flatnonzero(counted[split.rows])) for split in splits]
    trained = [s for s in there if len(s.rows) and minibatches.kind[s.rows[0]] == TRAINING]
    return max(trained, key=lambda split: int(split.window.sum()), default=None)


def _verdict(
    overall: Overall | None,
    pipelines: Sequence[PipelineReport],
    measured: Measured | None,
    links: Sequence[Link],
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


def _narrowed_layers(layers: Sequence[Layer], partition: int | None, name: str | None) -> tuple[Layer, ...]:
    chosen = [entry for entry in layers if partition in (None, entry.partition)]
    if name is not None:
        import fnmatch

        chosen = [entry for entry in chosen if fnmatch.fnmatchcase(entry.name, name)]
        if not chosen:
            known = ", ".join(entry.name for entry in layers[:8]) + (", ..." if len(layers) > 8 else "")
            raise ValueError(f"no layer is named {name!r} (layers: {known or 'none'})")
    return tuple(chosen)
