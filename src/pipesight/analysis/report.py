"""The report of a run: what `analyse` finds, as plain data that the views draw."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipesight.analysis.collectives import Collective
from pipesight.analysis.critical_path import CriticalPath
from pipesight.analysis.curves import Curve, Moment
from pipesight.analysis.gpu_times import GpuTimes, ProfiledSteps
from pipesight.analysis.layer_times import LayerReport
from pipesight.analysis.logged_steps import LoggedSteps
from pipesight.analysis.measured_costs import Measured
from pipesight.analysis.memory import MemoryReport
from pipesight.analysis.nonfinite import NonFinite
from pipesight.analysis.overall import Overall
from pipesight.analysis.own_spans import OwnTime
from pipesight.analysis.pace_change import PaceChange
from pipesight.analysis.pipeline_report import PipelineReport
from pipesight.analysis.pipelining_lead import PipeliningLead
from pipesight.analysis.program_report import OwnSpan, ProgramReport
from pipesight.analysis.rank_links import LinkReport
from pipesight.analysis.rank_waits import LateRank
from pipesight.analysis.run_remarks import Remark
from pipesight.analysis.step_grouping import TRAINING, MiniBatchTable
from pipesight.analysis.step_times import StepTimes
from pipesight.analysis.stragglers import Straggler
from pipesight.analysis.verdict import Verdict
from pipesight.analysis.what_if import WhatIf
from pipesight.runs.reading.event_tables import Column, ProgramSpans, Tasks

__all__ = ["ExcludedSteps", "NameTime", "Report"]


@dataclass(frozen=True, slots=True)
class NameTime:
    """All spans of one name, in microseconds."""

    category: str
    """As the trace has it, such as `compute`."""
    name: str
    """The name of the spans."""
    count: int
    """How many there are."""
    total: int
    """Time in them, nested spans included."""


@dataclass(frozen=True, slots=True)
class ExcludedSteps:
    """Steps that the overall numbers do not count."""

    warm_up: tuple[int, ...] = ()
    """Numbers of the first steps, which are slower than the rest."""
    incomplete: int = 0
    """How many steps lack tasks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Report:
    """All findings about a run. Times are microseconds, shares are of 1."""

    path: str
    """The run directory or trace."""
    description: Mapping[str, Any]
    """What `run.json` says; empty for a bare trace."""
    events: int
    """How many were read."""
    attempt: int
    """The attempt of a restarted run that was read, counting from 0."""
    attempts: tuple[int, ...]
    """The attempts that left a trace."""
    ranks: tuple[int, ...]
    """The ranks that were read."""
    replicas: Mapping[int, int] = field(default_factory=dict)
    """The replica of each rank that has tasks."""
    remarks: tuple[Remark, ...] = ()
    """What is missing, damaged or doubtful in the files."""
    verdict: Verdict
    """The first lines of the report, and its advice."""
    overall: Overall | None = None
    """``None`` if no step is complete."""
    left: ExcludedSteps = field(default_factory=ExcludedSteps)
    """Steps excluded from `overall`."""
    pipelines: tuple[PipelineReport, ...] = ()
    """One for each number of partitions that ran."""
    measured: Measured | None = field(default=None, repr=False)
    """What plans are made of; ``None`` if there is nothing to plan by."""
    steps: StepTimes = field(default_factory=StepTimes.none, repr=False)
    """Complete steps, warm-up included."""
    counted: Column = field(default_factory=lambda: np.zeros(0, bool), repr=False)
    """Which of them make up ``overall``."""
    evaluations: int = 0
    """Mini-batches without a backward."""
    layers: tuple[LayerReport, ...] = ()
    """In the order of the model."""
    stragglers: tuple[Straggler, ...] = ()
    """Partitions that are slower on one rank than on others, or slow at times."""
    links: tuple[LinkReport, ...] = ()
    """Between ranks, those that cost most first."""
    held: tuple[LateRank, ...] = ()
    """Ranks that keep others waiting in collectives, those that cost most first."""
    collectives: tuple[Collective, ...] = ()
    """Of the main threads, those that take longest first."""
    what_if: WhatIf | None = None
    """How much faster it would be without stragglers; ``None`` if there is nothing to replay."""
    pace: PaceChange | None = None
    """Since when steps take longer than before, and why; only of a run that is followed."""
    nonfinite: NonFinite | None = None
    """The first tensor with NaN or Inf, if statistics were recorded and there was one."""
    gpus: tuple[GpuTimes, ...] = ()
    """What GPUs did, of a trace of PyTorch's profiler: one for each rank."""
    logged: LoggedSteps | None = None
    """Of a training log of Megatron-LM: its iterations and timers."""
    profiled: tuple[ProfiledSteps, ...] = ()
    """The steps of a trace of PyTorch's profiler: one for each rank."""
    names: tuple[NameTime, ...] = ()
    """Where the time went, of a trace that has neither tasks nor steps."""
    program: ProgramReport | None = None
    """Of a program without a pipeline: its steps, their parts, and its modules."""
    lead: PipeliningLead | None = None
    """What a pipeline would give such a program."""
    own_spans: tuple[OwnSpan, ...] = ()
    """Spans that the user recorded, the longest first."""
    own_times: tuple[OwnTime, ...] = ()
    """What these cover of the time between the passes and the steps of a pipeline, most first."""
    curves: tuple[Curve, ...] = ()
    """Counters over steps: the loss, the learning rate, and the user's own."""
    moments: tuple[Moment, ...] = ()
    """Instants that the user recorded, by time."""
    memory: MemoryReport | None = field(default=None, repr=False)
    """What was in memory; ``None`` if it was not counted."""
    critical_path: CriticalPath | None = field(default=None, repr=False)
    """Of the typical step; ``None`` without tasks, or where it is not known."""
    minibatches: MiniBatchTable = field(default_factory=MiniBatchTable.empty, repr=False)
    """All mini-batches, including incomplete ones."""
    own: ProgramSpans = field(default_factory=ProgramSpans.empty, repr=False)
    """The spans of `own_spans`, beside a pipeline."""
    tasks: Tasks = field(default_factory=Tasks.empty, repr=False)
    """The tasks of the mini-batches, in their order."""

    def __repr__(self) -> str:
        return f"<Report {self.path!r}: {self.verdict.text}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the verdict, the figures, a step's timeline, and where the time goes."""
        # A view draws it, which is above this package and is imported only here.
        html: str = importlib.import_module("pipesight.view.notebook").report_html(self)
        return html

    @property
    def taking_turns(self) -> frozenset[int]:
        """Ranks that have several partitions and compute for one at a time: the bubble is theirs, not a partition's."""
        shared = [one for one in self.pipelines if one.workers < one.partitions and one.worker_noun == "rank"]
        return frozenset(rank for pipeline in shared for row in pipeline.rows for rank in row.ranks)

    @property
    def trained(self) -> bool:
        """Whether a mini-batch has all its forwards and backwards."""
        return bool((self.minibatches.kind == TRAINING).any())

    @property
    def typical(self) -> int | None:
        """A typical step: of the tenth whose times are closest to the median, the one with the median bubble."""
        rows = np.flatnonzero(self.counted)
        if self.overall is None or not len(rows):
            return None
        nearest = np.argsort(np.abs(self.steps.period[rows] - self.overall.time.median), kind="stable")
        rows = rows[nearest[: -(-len(rows) // 10)]]
        return int(self.steps.step[rows[np.argmin(np.abs(self.steps.bubble[rows] - self.overall.bubbles.median))]])

    def bubbles(self) -> dict[int, float]:
        """Return the bubble of each complete step, by its number: the mean over its replicas."""
        steps = self.steps.over_replicas()
        return dict(zip(steps.step.tolist(), steps.bubble.tolist(), strict=True))
