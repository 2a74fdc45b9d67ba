"""A step drawn in text: one row per partition, blocks with the number of their micro-batch, dots while idle.

::

    0  │F0F1F2F3·················B3═══R2B2══R1B1══R0B0══│
    1  │··F0F1F2F3··········B3═══R2B2══R1B1══R0B0══·····│

Where partitions have other numbers than their ranks, rows are by rank, and named after both: ``r0 p2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesight._formatting import percent, time
from pipesight._plurals import count_of
from pipesight.analysis.lane_bubbles import Lane, lane_bubbles
from pipesight.analysis.report import Report
from pipesight.analysis.step_grouping import EVALUATION
from pipesight.analysis.step_times import PARTS
from pipesight.analysis.verdict import TITLES
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from pipesight.runs.reading.event_tables import Column, Tasks
from pipesight.view.text_layout import Style

__all__ = ["DRAWN", "DrawnStep", "Glyphs", "coloured", "draw_step", "title_of"]

DRAWN = 0
"""The replica that is drawn, of several."""
_COLOURS = ("green", "yellow", "cyan", "magenta")  # by phase


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What blocks are drawn with. ``fill`` is by phase."""

    fill: str = "━╌═─"
    idle: str = "·"
    edges: tuple[str, str] = ("│", "│")
    letters: str = "FRBW"

    @classmethod
    def ascii(cls) -> Glyphs:
        """Return glyphs that every terminal has."""
        return cls(fill="->=~", idle=".", edges=("|", "|"))


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A drawn step: lines of one width, and for each cell of a line the phase it shows, -1 for none."""

    partitions: tuple[int, ...]
    labels: tuple[str, ...]
    lines: tuple[str, ...]
    phases: tuple[tuple[int, ...], ...]
    bubbles: tuple[float | None, ...]
    """Of partitions or, where those of a rank take turns, of the rank, beside the first of them."""
    begin: int
    end: int
    minibatches: int
    """How many mini-batches the step has; the first is drawn."""


def draw_step(
    report: Report, step: int, *, width: int, replica: int = DRAWN, glyphs: Glyphs | None = None
) -> DrawnStep:
    """Draw the first mini-batch of a step in ``width`` characters with labels; ``ValueError`` without such a step."""
    glyphs = Glyphs() if glyphs is None else glyphs
    minibatches = report.minibatches
    rows = np.flatnonzero((minibatches.step == step) & (minibatches.replica == replica))
    training = rows[minibatches.kind[rows] != EVALUATION]
    rows = training if len(training) else rows
    if not len(rows):
        there = np.unique(minibatches.step)
        known = f"{there[0]} to {there[-1]}" if len(there) else "none"
        raise ValueError(f"no tasks of step {step} were recorded (recorded: {known})")
    minibatch = minibatches.where(rows[:1])
    tasks = report.tasks.where(minibatch.task_rows())
    begin, end = int(tasks.begin.min()), int(tasks.end.max())
    lanes = _lanes(tasks, int(minibatch.partitions[0]), replica)
    same = all(lane.rank == lane.partition for lane in lanes) or len({lane.rank for lane in lanes}) == 1
    labels = [str(lane.partition) if same else f"r{lane.rank} p{lane.partition}" for lane in lanes]
    room = max(width - max(map(len, labels)), 10)
    drawn = [_drawn(tasks.where(tasks.partition == lane.partition), begin, end, room, glyphs) for lane in lanes]
    bubbles = lane_bubbles(minibatch, report.tasks, lanes, taking_turns=report.taking_turns)
    for k in range(len(lanes) - 1, 0, -1):  # the bubble of a rank is shown once
        if lanes[k].rank == lanes[k - 1].rank and lanes[k].rank in report.taking_turns:
            bubbles[k] = None
    return DrawnStep(
        partitions=tuple(lane.partition for lane in lanes),
        labels=tuple(labels),
        lines=tuple(text for text, _ in drawn),
        phases=tuple(tuple(phases.tolist()) for _, phases in drawn),
        bubbles=tuple(bubbles),
        begin=begin,
        end=end,
        minibatches=len(rows),
    )


def title_of(report: Report, step: int, drawn: DrawnStep) -> str:
    """Return the heading of a drawn step."""
    replica = f" of replica {DRAWN}" if len({*report.replicas.values()}) > 1 else ""
    minibatch = f", mini-batch 1 of {drawn.minibatches}" if drawn.minibatches > 1 else ""
    return f"Step {step}{replica}{minibatch}, window {time(drawn.end - drawn.begin)}"


def coloured(text: str, phases: Sequence[int], style: Style) -> str:
    """Return a line of a timeline in the colours of its phases."""
    drawn, start = [], 0
    for k in range(1, len(text) + 1):
        if k == len(text) or phases[k] != phases[start]:
            drawn.append(style.paint(text[start:k], "dim" if phases[start] < 0 else _COLOURS[phases[start]]))
            start = k
    return "".join(drawn)


def timeline_block(report: Report, step: int, style: Style, *, most: int) -> list[str]:
    """Draw a step with a heading, a legend, at most so many rows, and where its time went."""
    glyphs = Glyphs.ascii() if style.ascii else Glyphs()
    timeline = draw_step(report, step, width=style.width - 12, glyphs=glyphs)
    label = max(len(text) for text in timeline.labels)
    there = {phase for phases in timeline.phases for phase in phases}
    recompute = "R recompute, " if RECOMPUTE in there else ""
    backward = "B and W backward" if WEIGHT in there else "B backward"
    whose = " of the rank" if report.taking_turns else ""
    legend = f"F forward, {recompute}{backward}; right: bubble{whose}"
    title = title_of(report, step, timeline)
    head = [style.paint(title, "bold"), style.paint(legend, "dim")]
    lines = ["   ".join(head)] if len(title) + len(legend) + 3 <= style.width else head
    shown = list(zip(timeline.labels, timeline.lines, timeline.phases, timeline.bubbles, strict=True))[:most]
    for name, text, phases, bubble in shown:
        left, right = glyphs.edges
        share = percent(bubble) if bubble is not None else ""
        lines.append(f"  {name:>{label}} {left}{coloured(text, phases, style)}{right} {share:>6}".rstrip())
    if len(timeline.labels) > len(shown):
        more = count_of(len(timeline.labels) - len(shown), "more partition")
        lines.append(style.paint(f"  and {more}", "dim"))
    return [*lines, *(style.paint(line, "dim") for line in _parts_of(report, step, style))]


def _parts_of(report: Report, step: int, style: Style) -> list[str]:
    """Say where the time of one step went."""
    rows = np.flatnonzero(report.steps.step == step)
    if not len(rows):
        return []
    parts, period = report.steps.parts[:, rows[0]], max(float(report.steps.period[rows[0]]), 1e-9)
    named = [
        f"{TITLES[name]} {percent(p / period)}" for name, p in zip(PARTS, parts, strict=True) if p >= period * 0.005
    ]
    text = f"The whole step takes {time(period)}: {', '.join(named)}."
    return style.wrapped(text, indent="  ")


def _lanes(tasks: Tasks, partitions: int, replica: int) -> list[Lane]:
    """Return the lanes, by rank; a partition without tasks goes with the first."""
    ranks = dict(zip(tasks.partition.tolist(), tasks.rank.tolist(), strict=True))
    return sorted(Lane(ranks.get(j, int(tasks.rank.min())), j, replica) for j in range(partitions))


def _drawn(tasks: Tasks, begin: int, end: int, width: int, glyphs: Glyphs) -> tuple[str, NDArray[np.int64]]:
    """Draw the tasks of one partition; return the text, and the phase in each cell."""
    cells = [glyphs.idle] * width
    phases = np.full(width, -1)
    scale = width / max(end - begin, 1)
    edges = zip(_cells(tasks.begin - begin, scale, width), _cells(tasks.end - begin, scale, width), strict=True)
    rows = zip(tasks.phase.tolist(), tasks.microbatch.tolist(), edges, strict=True)
    for phase, microbatch, (left, right) in rows:
        # A task that is shorter than a cell still shows, unless another has that cell.
        right = max(right, left + 1) if left < width and phases[left] < 0 else right
        label = f"{glyphs.letters[phase]}{microbatch}"
        block = label if len(label) <= right - left else glyphs.letters[phase]
        block = (block + glyphs.fill[phase] * (right - left))[: right - left]
        cells[left:right] = block
        phases[left:right] = phase
    return "".join(cells[:width]), phases


def _cells(times: Column, scale: float, width: int) -> Sequence[int]:
    cells: list[int] = np.clip(np.rint(times * scale), 0, width).astype(int).tolist()
    return cells


assert (FORWARD, RECOMPUTE, BACKWARD) == (0, 1, 2)  # the order of `letters` and `fill`
