"""A step drawn in text: a row a partition, blocks with the number of their micro-batch, dots while idle.

::

    0  │F0F1F2F3·················B3═══R2B2══R1B1══R0B0══│
    1  │··F0F1F2F3··········B3═══R2B2══R1B1══R0B0══·····│

Where partitions have other numbers than their ranks, rows are by rank, and named after both: ``r0 p2``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesight.analysis.report import Report
from pipesight.analysis.step_grouping import EVALUATION
from pipesight.runs.reading.event_tables import BACKWARD, FORWARD, RECOMPUTE, Column, Tasks
from pipesight.view.text_layout import Style

__all__ = ["DRAWN", "DrawnStep", "Glyphs", "coloured", "draw_step"]

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
        """Return some that every terminal has."""
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


def draw_step(
    report: Report, step: int, *, width: int, replica: int = DRAWN, glyphs: Glyphs | None = None
) -> DrawnStep:
    """Draw the first mini-batch of a step, its lines and their labels in ``width`` characters.

    Raises:
        ValueError: There is no such step.
    """
    glyphs = Glyphs() if glyphs is None else glyphs
    minibatches = report.minibatches
    rows = np.flatnonzero((minibatches.step == step) & (minibatches.replica == replica))
    training = rows[minibatches.kind[rows] != EVALUATION]
    rows = training if len(training) else rows
    if not len(rows):
        there = np.unique(minibatches.step)
        known = f"{there[0]} to {there[-1]}" if len(there) else "none"
        raise ValueError(f"no tasks of step {step} were recorded (recorded: {known})")
    first, count = int(minibatches.first[rows[0]]), int(minibatches.count[rows[0]])
    tasks = report.tasks.where(np.arange(first, first + count))
    begin, end = int(tasks.begin.min()), int(tasks.end.max())
    lanes = _lanes(tasks, int(minibatches.partitions[rows[0]]))
    same = all(rank == j for rank, j in lanes) or len({rank for rank, _ in lanes}) == 1
    labels = [str(j) if same else f"r{rank} p{j}" for rank, j in lanes]
    room = max(width - max(map(len, labels)), 10)
    drawn = [_lane(tasks.where(tasks.partition == j), begin, end, room, glyphs) for _, j in lanes]
    return DrawnStep(
        partitions=tuple(j for _, j in lanes),
        labels=tuple(labels),
        lines=tuple(text for text, _ in drawn),
        phases=tuple(tuple(phases.tolist()) for _, phases in drawn),
        bubbles=tuple(_bubbles(tasks, lanes, report.taking_turns, begin, end)),
        begin=begin,
        end=end,
    )


def coloured(text: str, phases: Sequence[int], style: Style) -> str:
    """Return a line of a timeline in the colours of its phases."""
    drawn, start = [], 0
    for k in range(1, len(text) + 1):
        if k == len(text) or phases[k] != phases[start]:
            drawn.append(style.paint(text[start:k], "dim" if phases[start] < 0 else _COLOURS[phases[start]]))
            start = k
    return "".join(drawn)


def _lanes(tasks: Tasks, partitions: int) -> list[tuple[int, int]]:
    """Return the rank and the number of each partition, by rank; one without tasks goes with the first."""
    ranks = dict(zip(tasks.partition.tolist(), tasks.rank.tolist(), strict=True))
    return sorted((ranks.get(j, int(tasks.rank.min())), j) for j in range(partitions))


def _bubbles(
    tasks: Tasks, lanes: Sequence[tuple[int, int]], taking_turns: Collection[int], begin: int, end: int
) -> Iterator[float | None]:
    before = None
    for rank, j in lanes:
        own = tasks.rank == rank if rank in taking_turns else tasks.partition == j
        yield None if rank == before and rank in taking_turns else _bubble(tasks.where(own), begin, end)
        before = rank


def _bubble(tasks: Tasks, begin: int, end: int) -> float:
    order = np.argsort(tasks.begin, kind="stable")
    reached = np.maximum.accumulate(tasks.end[order]) if len(tasks) else tasks.end
    before = np.concatenate([[begin], reached[:-1]]) if len(tasks) else tasks.begin
    busy = int((reached - np.maximum(tasks.begin[order], before)).clip(0).sum())
    return 1 - busy / max(end - begin, 1)


def _lane(tasks: Tasks, begin: int, end: int, width: int, glyphs: Glyphs) -> tuple[str, NDArray[np.int64]]:
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


assert (FORWARD, RECOMPUTE, BACKWARD) == (0, 1, 2)  # as letters and fills are written
