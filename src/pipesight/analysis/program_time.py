"""Where the time of a program's steps goes: each moment belongs to the innermost span that is open, so it counts once.

What no span covers is between the others. Spans of the user's own that contain the beginnings of several steps, such as
one around an epoch, say nothing about a step and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesight.analysis.program_steps import ProgramSteps, is_backward, is_call, is_whole_step
from pipesight.runs.reading.event_codes import CHECKPOINT, COMMUNICATION, DATA, EVALUATION, OPTIMIZER, PROGRAM
from pipesight.runs.reading.event_tables import Column, ProgramSpans

__all__ = ["KINDS", "OWN", "PART_TITLES", "REST", "Pieces"]
__all__ += ["is_own", "nest", "nested_pieces", "own_name", "part_names", "part_title", "parts_of"]

KINDS = (
    "data_loading",
    "forward",
    "loss",
    "recompute",
    "backward",
    "optimizer",
    "communication",
    "checkpoints",
    "copies",
    "evaluation",
)
"""The parts of a step that PyTorch itself shows, in the order in which they are listed."""
OWN = "own:"
"""Parts that are spans of the user's own begin with this, before their name."""
REST = "between"
"""What no span covers."""

PART_TITLES = {
    "data_loading": "data loading",
    "forward": "forward",
    "loss": "loss",
    "recompute": "recomputation",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "communication",
    "checkpoints": "checkpoints",
    "copies": "copies between devices",
    "evaluation": "evaluation",
    REST: "between",
}
"""The parts of a step in words, but for spans of the user's own, which have their names."""

_CONVENTIONAL = {"compute", "dataloader", "data", "comm", "device", "checkpoint", "pipeline"}
_EVALUATING = ("evaluate", "test")
_CLOSURE = ("compute", "step.closure")
"""What an optimizer's step calls, such as a trainer's whole micro-batch: it is not the optimizer's time."""


def is_own(spans: ProgramSpans) -> Column:
    """Return which spans are of the user's own: with names that PyTorch's have not."""
    names, which = np.unique(_joined(spans), return_inverse=True)
    own = np.array([_is_own(*str(name).split("\0")) for name in names], bool)
    found: Column = own[which] & (spans.kind == PROGRAM) & (spans.module == "") & ~is_whole_step(spans)
    return found


def own_name(name: str) -> str:
    """Return what a span of the user's own is called: those derived from ``ai`` itself without its name.

    >>> own_name("ai_root.metrics")
    'metrics'
    """
    return name.removeprefix("ai_root.")


def _joined(spans: ProgramSpans) -> Column:
    pairs = zip(spans.category.tolist(), spans.name.tolist(), strict=True)
    return np.array([f"{category}\0{name}" for category, name in pairs], object).astype(str)


def _is_own(category: str, name: str) -> bool:
    if category not in _CONVENTIONAL:
        return True
    # A derived event, such as forward.attention, has a name of the user's own; a loop's is about the loop.
    if (category, name) == _CLOSURE:
        return False
    return "." in name and not name.endswith((".iter", ".block", ".init", ".wait"))


def part_title(part: str) -> str:
    """Return what a part is called."""
    return part.removeprefix(OWN) if part.startswith(OWN) else PART_TITLES[part]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Spans of one rank, cut where steps begin, each with what is open around it."""

    spans: ProgramSpans
    """By begin, an outer one before those inside."""
    step: Column
    """The row of the step that each lies in."""
    outer: Column
    """The row of the piece around it, -1 if there is none."""
    alone: NDArray[np.int64]
    """The time in it, without the pieces inside."""
    depth: Column
    """How many pieces are around it."""
    part: Sequence[str]
    """What its own time counts as."""


def nested_pieces(spans: ProgramSpans, steps: ProgramSteps) -> Pieces:
    """Cut the spans of a rank at the beginnings of its steps, and nest them."""
    edges = np.append(steps.begin, steps.end[-1:])
    first = np.searchsorted(edges, spans.begin, side="right") - 1
    last = np.searchsorted(edges, np.maximum(spans.end - 1, spans.begin), side="right") - 1
    kept = np.flatnonzero((last - first <= 1) & (last >= 0) & (first < len(steps)))
    rows = np.concatenate([kept, kept[last[kept] > first[kept]]])
    step = np.concatenate([first[kept], last[kept][last[kept] > first[kept]]])
    inside = (step >= 0) & (step < len(steps))
    rows, step = rows[inside], step[inside]
    begin = np.maximum(spans.begin[rows], steps.begin[step])
    end = np.minimum(spans.end[rows], steps.end[step])
    order = np.lexsort((-spans.end[rows], -end, begin))
    rows, step, begin, end = rows[order], step[order], begin[order], end[order]
    outer, end, depth = nest(begin, end)
    chosen = spans.where(rows)
    cut = ProgramSpans(**{**chosen.columns(), "begin": begin, "end": end})
    alone = (end - begin).astype(np.int64)
    np.subtract.at(alone, outer[outer >= 0], (end - begin)[outer >= 0])
    return Pieces(cut, step, outer, alone, depth, _parts(cut, outer))


def nest(begin: Column, end: Column) -> tuple[Column, Column, Column]:
    """Return the row around each, the ends, none after that of the row around, and how deep each is."""
    outer, ends, depth = [-1] * len(begin), end.tolist(), [0] * len(begin)
    open_: list[int] = []
    for row, start in enumerate(begin.tolist()):
        while open_ and ends[open_[-1]] <= start:
            open_.pop()
        if open_:
            outer[row] = open_[-1]
            ends[row] = min(ends[row], ends[open_[-1]])
        depth[row] = len(open_)
        open_.append(row)
    return np.array(outer, np.int64), np.array(ends, np.int64), np.array(depth, np.int64)


def _parts(spans: ProgramSpans, outer: Column) -> list[str]:
    """Return what the time in each piece counts as."""
    by_kind = {
        DATA: "data_loading",
        OPTIMIZER: "optimizer",
        CHECKPOINT: "checkpoints",
        COMMUNICATION: "communication",
        EVALUATION: "evaluation",
    }
    calls, backwards, own = is_call(spans).tolist(), is_backward(spans).tolist(), is_own(spans).tolist()
    rows = zip(spans.kind.tolist(), spans.category.tolist(), spans.name.tolist(), spans.module.tolist(), strict=True)
    found: list[str] = []
    for row, (kind, category, name, module) in enumerate(rows):
        around = found[outer[row]] if outer[row] >= 0 else REST
        if kind in by_kind:
            found.append(by_kind[kind])
        elif own[row]:
            found.append(OWN + own_name(name))
        elif backwards[row]:
            found.append("backward")
        elif calls[row]:
            again = around in ("backward", "recompute")
            inner = around in ("forward", "loss")
            is_loss = module.endswith("Loss")
            found.append("recompute" if again else around if inner else "loss" if is_loss else "forward")
        elif (category, name) == _CLOSURE:
            found.append(REST)
        elif category == "device":
            found.append("copies")
        elif category == "pipeline" and name.partition(".")[0] in _EVALUATING:
            found.append("evaluation")
        else:
            found.append(around)
    return found


def part_names(pieces: Sequence[Pieces]) -> tuple[str, ...]:
    """Return all parts that steps have: those of PyTorch, the user's own, and the rest."""
    there = {name for own in pieces for name in own.part}
    own = sorted(name for name in there if name.startswith(OWN))
    return (*(name for name in KINDS if name in there), *own, REST)


def parts_of(pieces: Pieces, steps: ProgramSteps, names: Sequence[str]) -> NDArray[np.float64]:
    """Return how long each part of each step took; they add up to the length of the step."""
    places = {name: k for k, name in enumerate(names)}
    which = np.array([places[name] for name in pieces.part], np.int64)
    parts = np.zeros((len(names), len(steps)))
    np.add.at(parts, (which, pieces.step), pieces.alone)
    rest = (steps.end - steps.begin) - parts.sum(axis=0)
    parts[places[REST]] += rest
    return parts
