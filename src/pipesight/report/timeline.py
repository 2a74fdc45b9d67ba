"""A step drawn in text: a row a partition, blocks with the number of their micro-batch, dots where it stands still.

::

    0  │F0F1F2F3·················B3═══R2B2══R1B1══R0B0══│
    1  │··F0F1F2F3··········B3═══R2B2══R1B1══R0B0══·····│
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesight.report.analysis.analysing import Report
from pipesight.report.analysis.windows import EVALUATION
from pipesight.report.reading.tables import BACKWARD, FORWARD, RECOMPUTE, Column, Tasks

__all__ = ["Glyphs", "Timeline", "draw_step"]


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
class Timeline:
    """A drawn step: lines of one width, and for each cell of a line the phase it shows, -1 for none."""

    labels: tuple[str, ...]
    lines: tuple[str, ...]
    phases: tuple[tuple[int, ...], ...]
    bubbles: tuple[float, ...]
    begin: int
    end: int


def draw_step(report: Report, step: int, *, width: int, replica: int = 0, glyphs: Glyphs | None = None) -> Timeline:
    """Draw the first mini-batch of a step in ``width`` characters.

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
    partitions = range(int(minibatches.partitions[rows[0]]))
    drawn = [_lane(tasks.where(tasks.partition == j), begin, end, width, glyphs) for j in partitions]
    return Timeline(
        labels=tuple(str(j) for j in partitions),
        lines=tuple(text for text, _ in drawn),
        phases=tuple(tuple(phases.tolist()) for _, phases in drawn),
        bubbles=tuple(_bubble(tasks.where(tasks.partition == j), begin, end) for j in partitions),
        begin=begin,
        end=end,
    )


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
