"""Remarks on a run: how it ended, what was not recorded, which of its numbers are in doubt."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipesight._formatting import percent, time
from pipesight._plurals import count_of, plural
from pipesight.analysis.batch_sizes import sizes_in
from pipesight.analysis.clock_errors import doubts_about_clocks
from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.memory import why_not_counted
from pipesight.analysis.planned_changes import AT_MOST, Change, too_large
from pipesight.analysis.program_steps import WHOLE_PASSES
from pipesight.analysis.program_time import OWN, REST, part_title
from pipesight.analysis.rank_waits import LateRank
from pipesight.analysis.step_grouping import INCOMPLETE, MiniBatchTable
from pipesight.analysis.step_times import StepTimes
from pipesight.analysis.verdict import MUCH, TITLES, Verdict
from pipesight.runs.reading.event_codes import OPTIMIZER
from pipesight.runs.reading.event_tables import Points, Spans, Tasks
from pipesight.runs.reading.process_liveness import KILLED, ending_of

if TYPE_CHECKING:
    from pipesight.analysis.curves import Curve
    from pipesight.analysis.measured_costs import Measured
    from pipesight.analysis.overall import Overall
    from pipesight.analysis.program_report import ProgramReport
    from pipesight.runs.reading.run import Run

__all__ = [
    "Remark",
    "doing_title",
    "remarks_on",
    "remarks_on_bubble",
    "remarks_on_clocks",
    "remarks_on_measuring",
    "remarks_on_memory",
    "remarks_on_program",
    "remarks_on_samples",
    "remarks_on_simulation",
    "with_ending",
    "with_losses",
    "with_waits",
]

LONGEST = 400
"""Characters of an outcome, which may be the message of an error."""
VISIBLE = 0.0005
"""Differences of shares below this do not show in a report."""
FAR_OFF = 0.25
"""The error of a simulated step above which simulated gains are in doubt."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A warning about the files or the numbers of a run."""

    path: str | None
    """The file, if it is about one."""
    text: str
    """One sentence."""


def with_ending(verdict: Verdict, run: Run) -> Verdict:
    """Add how the run ended, unless it ended well or is still followed."""
    if (restarts := _restarts(run)) is not None:
        verdict = replace(verdict, text=f"{verdict.text} {restarts}")
        if not run.attempt.described:
            return verdict
    outcome = run.description.get("outcome")
    if not (outcome is None and run.followed) and (ending := ending_of(run.description)) is not None:
        text = f"The run has ended: {textwrap.shorten(ending, LONGEST, placeholder=' ..')}."
    elif isinstance(outcome, str) and outcome.strip() not in ("", "ok"):
        first = outcome.strip().splitlines()[0].rstrip(".")
        text = f"The run ended with {textwrap.shorten(first, LONGEST, placeholder=' ..')}."
    elif run.description and outcome is None and not run.followed:
        if run.was_killed():
            text = f"The run has ended: {KILLED}. This is as far as it got."
        else:
            text = "The run has not ended or was killed; this is as far as it got."
    else:
        return verdict
    return replace(verdict, text=f"{verdict.text} {text}")


def with_losses(verdict: Verdict, curves: Sequence[Curve], *, watched: bool = True) -> Verdict:
    """Say in which step the loss was not finite first and, where no tensors were ``watched``, how to find the cause."""
    for curve in curves:
        if curve.name == "loss" and (step := curve.first_nonfinite) is not None:
            how = "" if watched else " Which tensor was so first, pipesight run --stats tells."
            return replace(verdict, text=f"The loss is not finite in step {step}.{how} {verdict.text}")
    return verdict


def doing_title(doing: str) -> str:
    """Say what a rank does that keeps others waiting.

    >>> doing_title("between_steps")
    'code between steps'
    """
    if doing == "between_steps":
        return "code between steps"
    return "code that no span covers" if doing == REST else TITLES.get(doing) or part_title(doing)


def with_waits(verdict: Verdict, held: Sequence[LateRank]) -> Verdict:
    """Name the rank that costs the others most waiting."""
    if not held or held[0].share < MUCH:
        return verdict
    first = held[0]
    doing = f"its {doing_title(first.doing)}"
    who = "the others wait" if len(first.ranks) > 1 else f"rank {first.ranks[0]} waits"
    return replace(verdict, text=f"{verdict.text} Look at rank {first.rank}: {who} for {doing}.")


def _restarts(run: Run) -> str | None:
    """Say which attempt it is, of a run that was restarted."""
    attempt = run.attempt
    if not attempt.restarts:
        return None
    often = {1: "once", 2: "twice"}.get(attempt.restarts, f"{attempt.restarts:,} times")
    which = "the last" if attempt.number == attempt.restarts else "not the last"
    if attempt.number == attempt.there[-1] != attempt.restarts:
        which = "the last that left a trace"
    return f"Restarted {often}; this is attempt {attempt.number}, {which}."


def remarks_on(run: Run, minibatches: MiniBatchTable | None = None, spans: Spans | None = None) -> list[Remark]:
    """Return what was not recorded or could not be read, and why."""
    found = [Remark(str(note.path) if note.path else None, note.text) for note in run.notes]
    left = run.description.get("left_out")
    for what, count in left.items() if isinstance(left, dict) else ():
        if isinstance(count, int) and count > 0:
            names = str(what).replace("_", " ")
            were = plural(count, f"{names.removesuffix('s')} was", f"{names} were")
            found.append(Remark(None, f"{count:,} {were} not recorded"))
    if minibatches is None:
        return found
    if spans is not None and (count := _never_stepped(minibatches, spans)):
        text = f"no optimizer step was seen, so all {count:,} mini-batches count as one step; to separate them, call"
        found.append(Remark(None, f"{text} run.step(number) inside 'with pipesight.observe(...) as run:'"))
    if broken := int((minibatches.kind == INCOMPLETE).sum()):
        text = plural(broken, "mini-batch is", "mini-batches are")
        found.append(Remark(None, f"{broken:,} {text} incomplete; their steps are excluded"))
    return found


def remarks_on_program(program: ProgramReport) -> list[Remark]:
    """Say what the numbers of a program without a pipeline leave out."""
    found = []
    if program.on_device:
        text = (
            "modules ran on a GPU; times are those of the main thread, which does not wait for the GPU: steps are "
            "right, but the time of a part or a module is that of launching its work"
        )
        found.append(Remark(None, text))
    if any(part.removeprefix(OWN) in WHOLE_PASSES for part in program.parts) and not program.modules.modules:
        text = "forward and backward are one span in the log: a bubble of a pipeline in it cannot be told"
        found.append(Remark(None, text))
    if program.samples_per_second is None and program.trains:
        text = (
            "samples/s are not known: no tensor was passed to the model by position, and no DataLoader gave its batches"
        )
        found.append(Remark(None, text))
    return found


def remarks_on_samples(described: Sequence[DescribedPipeline], minibatches: MiniBatchTable) -> list[Remark]:
    """Say that the samples of mini-batches were not recorded, or that they differ."""
    if len(described) == 1 and (text := sizes_in(minibatches, described[0].batch_size)) is not None:
        return [Remark(None, f"{text}; step times are those of all sizes")]
    sizes = [pipeline.batch_size for pipeline in described if pipeline.batch_size]
    if not sizes or (minibatches.samples >= 0).all():
        return []
    text = (
        f"samples/s are not known: the trace does not say how many samples each mini-batch has, only that the first "
        f"call of the pipeline had {sizes[0]:,}; to know them, record the run again"
    )
    return [Remark(None, text)]


def remarks_on_clocks(run: Run, tasks: Tasks) -> list[Remark]:
    """Say whether the clocks of ranks are too far apart to trust short waits."""
    text = doubts_about_clocks(run.description, tasks)
    return [] if text is None else [Remark(None, text)]


def remarks_on_bubble(overall: Overall | None, times: StepTimes) -> list[Remark]:
    """Name the step because of which the overall bubble is outside the range of most steps."""
    if overall is None or overall.bubbles.low - VISIBLE <= overall.bubble <= overall.bubbles.high + VISIBLE:
        return []
    row = int(np.argmax(np.abs(times.bubble - overall.bubbles.median) * times.window))
    text = (
        f"the overall bubble, {percent(overall.bubble)}, is outside p10 to p90 of the steps mostly because of step "
        f"{int(times.step[row])}, whose window takes {time(float(times.window[row]))} with a bubble of "
        f"{percent(float(times.bubble[row]))}"
    )
    return [Remark(None, text)]


def remarks_on_measuring(run: Run, times: StepTimes) -> list[Remark]:
    """Say in how many of the counted steps statistics were measured, and how long those took."""
    measured = np.isin(times.step, [*run.measured_steps()])
    if not measured.any():
        return []
    steps, own = len(np.unique(times.step)), len(np.unique(times.step[measured]))
    text = (
        f"statistics were measured in {own:,} of {count_of(steps, 'step')}; {plural(own, 'its time', 'their times')} "
    )
    text += plural(own, "includes it", "include it")
    if not measured.all():
        with_, without = (time(float(np.median(times.period[rows]))) for rows in (measured, ~measured))
        text += f" (median step: {with_} with, {without} without)"
    return [Remark(None, text)]


def remarks_on_simulation(measured: Measured | None, changes: Sequence[Change]) -> list[Remark]:
    """Say whether gains come from a simulation that is far off for the recorded settings."""
    if measured is None or abs(measured.error) <= FAR_OFF or not any(change.promise != AT_MOST for change in changes):
        return []
    text = f"the simulation of the recorded schedule is off by {measured.error:+.0%}"
    return [Remark(None, f"{text}; simulated gains may be off by as much")]


def remarks_on_memory(points: Points, measured: Measured | None = None) -> list[Remark]:
    """Say why memory was not counted, and what would help if there were more."""
    texts = why_not_counted(points), None if measured is None else too_large(measured)
    return [Remark(None, text) for text in texts if text is not None]


def _never_stepped(minibatches: MiniBatchTable, spans: Spans) -> int:
    """Return how many mini-batches make up the one step that there is because no optimizer ended it, or 0."""
    if len(np.unique(minibatches.step)) != 1 or (spans.kind == OPTIMIZER).any():
        return 0
    most = int(np.bincount(minibatches.replica).max())
    return most if most > 1 else 0
