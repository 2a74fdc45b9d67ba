"""What a program without a pipeline did: its steps, where their time went, its modules, spans and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesight.analysis.collectives import BackgroundCalls, WaitTable
from pipesight.analysis.curves import StepEdges
from pipesight.analysis.module_times import ModuleTimes, shows_modules, times_of_modules
from pipesight.analysis.program_steps import (
    ProgramSteps,
    find_program_steps,
    is_backward,
    is_call,
    is_whole_pass,
    is_whole_step,
)
from pipesight.analysis.program_time import Pieces, is_own, nested_pieces, own_name, part_names, parts_of
from pipesight.analysis.program_waits import ProgramWaits, program_waits
from pipesight.analysis.step_times import Summary, slow_first, summary
from pipesight.runs.reading.event_codes import DATA, EVALUATION, OPTIMIZER
from pipesight.runs.reading.event_tables import Column, ProgramSpans, data_frame

__all__ = ["OwnSpan", "ProgramReport", "ProgramTimes", "own_spans_of", "program_report"]


@dataclass(frozen=True, slots=True)
class OwnSpan:
    """All spans of one name that the user recorded, in microseconds."""

    name: str
    """As it is shown."""
    category: str
    """As the trace has it."""
    count: int
    """How many there are."""
    total: int
    """With what is inside."""
    longest: int
    """The longest one."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramTimes:
    """The steps that train, one rank after the other; the ``parts`` of a step add up to its ``period``."""

    names: tuple[str, ...]
    """Of the parts."""
    rank: Column
    """The rank."""
    step: Column
    """The number of the step."""
    begin: Column
    """When it began."""
    period: Column
    """Until the next began."""
    follows: Column
    """Whether the next was recorded."""
    samples: Column
    """-1 if that was not recorded."""
    parts: NDArray[np.float64]
    """By part and step."""

    def __len__(self) -> int:
        return len(self.step)

    def where(self, rows: Column) -> ProgramTimes:
        """Return some of the steps."""
        columns = {
            name: getattr(self, name)[rows] for name in ("rank", "step", "begin", "period", "follows", "samples")
        }
        return ProgramTimes(self.names, **columns, parts=self.parts[:, rows])

    def to_pandas(self) -> Any:
        """Return a pandas ``DataFrame`` with a row for each step of each rank; each part is a column."""
        own = (one.name for one in fields(self) if one.name not in ("names", "parts"))
        parts = dict(zip(self.names, self.parts, strict=True))
        return data_frame({name: getattr(self, name) for name in own} | parts)

    def by_step(self) -> tuple[Column, Column]:
        """Return the numbers of steps, and how long each took on the slowest rank."""
        numbers, which = np.unique(self.step, return_inverse=True)
        period = np.zeros(len(numbers), np.int64)
        np.maximum.at(period, which, self.period)
        return numbers, period


@dataclass(frozen=True, slots=True, eq=False)
class ProgramReport:
    """The steps of a program without a pipeline. Times are microseconds, shares are of 1."""

    trains: bool
    """Whether there is a backward or an optimizer; else its steps are batches."""
    ranks: int
    """How many it ran on."""
    steps: ProgramTimes
    """Those that train, warm-up included; the last of a rank is not, since its end is not known."""
    counted: Column
    """Which of them count."""
    warm_up: tuple[int, ...]
    """Numbers of the first steps, which are slower than the rest."""
    count: int
    """How many steps count, each on all ranks."""
    time: Summary
    """Of a step: on the slowest rank."""
    elapsed: float
    """What the counted steps took together."""
    samples_per_second: float | None
    """Over all ranks; ``None`` if the number of samples is not known."""
    parts: Mapping[str, float]
    """Of the mean step over all ranks, in order; they add up to its length."""
    modules: ModuleTimes
    """By the time in each alone."""
    evaluations: int
    """Calls of models without gradients."""
    on_device: bool
    """Whether modules ran on a GPU, so that times of modules are those of the host, which does not wait for it."""
    pieces: Mapping[int, Pieces] = field(repr=False)
    """The spans of each rank, as they are drawn."""
    all_steps: ProgramSteps = field(repr=False)
    """All steps, also those without training."""
    background: BackgroundCalls = field(repr=False)
    """What ran beside the main threads."""
    waits: ProgramWaits
    """What communication consists of, and which ranks come late."""

    @property
    def typical(self) -> int:
        """A typical step: of the half whose times are closest to the median, one that shows every module, if any."""
        times = self.steps.where(self.counted)
        nearest = np.argsort(np.abs(times.period - self.time.median), kind="stable")
        detailed = {
            int(self._steps_of(rank).step[row])
            for rank, own in self.pieces.items()
            for row in np.unique(own.step[shows_modules(own)]).tolist()
        }
        ordered = times.step[nearest].tolist()
        return next((int(step) for step in ordered[: -(-len(ordered) // 2)] if step in detailed), int(ordered[0]))

    def _steps_of(self, rank: int) -> ProgramSteps:
        return self.all_steps.where(self.all_steps.rank == rank)

    def edges(self) -> StepEdges:
        """Return when the steps of each rank begin."""
        return StepEdges(self.all_steps.rank, self.all_steps.step, self.all_steps.begin)

    def parts_of_step(self, number: int) -> dict[str, float] | None:
        """Return the parts of one step, as means over ranks; ``None`` if its end is not known."""
        rows = np.flatnonzero(self.steps.step == number)
        if not len(rows):
            return None
        return dict(zip(self.steps.names, self.steps.parts[:, rows].mean(axis=1).tolist(), strict=True))


def program_report(
    spans: ProgramSpans,
    *,
    only: range | None = None,
    on_device: bool = False,
    background: BackgroundCalls | None = None,
    waits: WaitTable | None = None,
) -> ProgramReport | None:
    """Say what a program did; ``None`` if it has no complete step, or if nothing of it says what computes.

    A trace of PyTorch's profiler has steps of the optimizer alone: what lies between these is not known.

    Steps that are not in ``only``, if given, are not reported. ``background`` is what ran beside the main threads,
    ``waits`` who waited for whom in collectives.

    Raises:
        ValueError: None of the wanted steps was recorded.
    """
    steps = find_program_steps(spans)
    spans = spans.where(~is_whole_step(spans))
    if not len(steps) or not (is_call(spans) | is_backward(spans) | is_whole_pass(spans)).any():
        return None
    if only is not None and not np.isin(steps.step, np.array(only)).any():
        asked = f"{only.start}" if len(only) == 1 else f"{only.start}:{only.stop - 1}"
        recorded = f"{steps.step.min()} to {steps.step.max()}"
        raise ValueError(f"none of these steps was recorded (requested: {asked}, recorded: {recorded})")
    ranks = np.unique(steps.rank).tolist()
    own = {rank: (spans.where(spans.rank == rank), steps.where(steps.rank == rank)) for rank in ranks}
    pieces = {rank: nested_pieces(*tables) for rank, tables in own.items()}
    names = part_names(list(pieces.values()))
    tables = [_times(pieces[rank], own[rank][1], names) for rank in ranks]
    complete = _joined(names, tables, own, only)
    if not len(complete):
        return None
    trained = any(_trains(spans) for spans, _ in own.values())
    numbers, period = complete.by_step()
    if not trained and len(numbers) < 2 and only is None:  # calls of something, but no loop over batches
        return None
    first = only is None or int(steps.step.min()) in only
    slow = slow_first(numbers, period) if first else numbers[:0]
    counted = ~np.isin(complete.step, slow)
    chosen = complete.where(counted)
    numbers, period = chosen.by_step()
    each = [(pieces[rank], _counts(own[rank][1], chosen.where(chosen.rank == rank))) for rank in ranks]
    edges = {rank: (own.begin, own.begin + own.period) for rank in ranks for own in [chosen.where(chosen.rank == rank)]}
    beside = BackgroundCalls.empty() if background is None else background
    elapsed = float(max(chosen.period[chosen.rank == rank].sum() for rank in ranks))
    return ProgramReport(
        trains=trained,
        ranks=len(ranks),
        steps=complete,
        counted=counted,
        warm_up=tuple(slow.tolist()),
        count=len(numbers),
        time=summary(period),
        elapsed=elapsed,
        samples_per_second=float(chosen.samples.sum()) / elapsed * 1e6 if (chosen.samples >= 0).all() else None,
        parts=dict(zip(names, chosen.parts.mean(axis=1).tolist(), strict=True)),
        modules=times_of_modules(each),
        evaluations=int(sum(_evaluations(own[rank][0]) for rank in ranks)),
        on_device=on_device,
        pieces=pieces,
        all_steps=steps,
        background=beside,
        waits=ProgramWaits() if waits is None else program_waits(waits, beside, pieces, edges),
    )


def own_spans_of(spans: ProgramSpans) -> tuple[OwnSpan, ...]:
    """Return the spans that the user recorded, by name, the longest first."""
    own = spans.where(is_own(spans))
    groups: dict[tuple[str, str], list[int]] = {}
    times = (own.end - own.begin).tolist()
    for category, name, time in zip(own.category.tolist(), own.name.tolist(), times, strict=True):
        groups.setdefault((str(category), own_name(str(name))), []).append(time)
    found = [OwnSpan(name, category, len(all_), sum(all_), max(all_)) for (category, name), all_ in groups.items()]
    return tuple(sorted(found, key=lambda span: -span.total))


def _trains(spans: ProgramSpans) -> bool:
    return bool((is_backward(spans) | (spans.kind == OPTIMIZER)).any())


def _counts(steps: ProgramSteps, chosen: ProgramTimes) -> Column:
    found: Column = np.isin(steps.step, chosen.step)
    return found


def _evaluations(spans: ProgramSpans) -> int:
    losses = np.char.endswith(spans.module.astype(str), "Loss")
    return int(((spans.kind == EVALUATION) & (spans.layer == "") & (spans.module != "") & ~losses).sum())


def _times(pieces: Pieces, steps: ProgramSteps, names: Sequence[str]) -> tuple[Column, NDArray[np.float64]]:
    """Return the samples of each step, and its parts."""
    return _samples(pieces, len(steps)), parts_of(pieces, steps, names)


def _samples(pieces: Pieces, steps: int) -> Column:
    """Return how many samples the training calls of each step had; -1 where that is not known.

    A call says it itself or, if it got no tensor by position, the batch that was fetched last before it does.
    """
    spans = pieces.spans
    fetched = np.flatnonzero((spans.kind == DATA) & (spans.samples >= 0))
    calls = np.flatnonzero(is_call(spans) & (spans.kind != EVALUATION) & (spans.layer == ""))
    inside = ("forward", "loss", "backward", "recompute")
    around = [pieces.part[outer] if outer >= 0 else None for outer in pieces.outer[calls].tolist()]
    parts = [pieces.part[row] for row in calls.tolist()]
    calls = calls[[part != "loss" and out not in inside for part, out in zip(parts, around, strict=True)]]
    total = np.zeros(steps, np.int64)
    unknown = np.zeros(steps, bool)
    last = np.searchsorted(fetched, calls) - 1
    for row, place in zip(calls.tolist(), last.tolist(), strict=True):
        own = int(spans.samples[row])
        samples = own if own >= 0 else int(spans.samples[fetched[place]]) if place >= 0 else -1
        if samples < 0:
            unknown[pieces.step[row]] = True
        else:
            total[pieces.step[row]] += samples
    return np.where(unknown | (total == 0), -1, total)


def _joined(
    names: tuple[str, ...],
    tables: Sequence[tuple[Column, NDArray[np.float64]]],
    own: Mapping[int, tuple[ProgramSpans, ProgramSteps]],
    only: range | None,
) -> ProgramTimes:
    """Put the steps of all ranks that train together; the last of a rank alone has an end that is not known."""
    steps = [entry[1] for entry in own.values()]
    joined = ProgramSteps.joined(*steps)
    kept = joined.trains.astype(bool) & (joined.end > joined.begin)
    if (kept & joined.follows.astype(bool)).any():
        kept &= joined.follows.astype(bool)
    if only is not None:
        kept &= np.isin(joined.step, np.array(only))
    rows = np.flatnonzero(kept)
    return ProgramTimes(
        names,
        rank=joined.rank[rows],
        step=joined.step[rows],
        begin=joined.begin[rows],
        period=(joined.end - joined.begin)[rows],
        follows=joined.follows[rows],
        samples=np.concatenate([table[0] for table in tables])[rows],
        parts=np.concatenate([table[1] for table in tables], axis=1)[:, rows],
    )
