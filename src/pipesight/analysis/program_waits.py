"""Communication of a program without a pipeline: waits for ranks that come late, what is exposed, and the rest.

A rank that is late keeps the others waiting in the next collective, which no faster network makes shorter. It is named,
with what it did meanwhile::

    rank 0   | all_reduce .............:====|       . waits for rank 1, which loads data
    rank 1   | data loading | all_reduce====|       = communication
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.collectives import BackgroundCalls, WaitTable
from pipesight.analysis.program_time import REST, Pieces
from pipesight.analysis.rank_waits import WORTH, LateRank, followed, unlikely
from pipesight.analysis.step_breakdown import Cover, overlapping
from pipesight.runs.reading.event_tables import Column

__all__ = ["ProgramWaits", "program_waits"]

_COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class ProgramWaits:
    """What the communication of the mean step consists of, in microseconds: means over ranks, which add up to it."""

    late: float = 0.0
    """Waiting for ranks that come late."""
    exposed: float = 0.0
    """Starting collectives in the background, and waiting for them once all ranks are there."""
    direct: float = 0.0
    """In collectives that the main thread waits for at once, once all ranks are there."""
    held: tuple[LateRank, ...] = ()
    """The ranks that come late more than chance explains, those that cost most first."""


def program_waits(
    waits: WaitTable,
    background: BackgroundCalls,
    pieces: Mapping[int, Pieces],
    steps: Mapping[int, tuple[Column, Column]],
) -> ProgramWaits:
    """Divide the communication of the steps that count.

    ``steps`` are when those that count begin and end, by rank. ``background`` is what runs beside the main threads.
    """
    counted = {rank: Cover(*edges) for rank, edges in steps.items()}
    waits = _within_steps(waits, counted)
    sums = np.zeros(3)
    for rank, there in pieces.items():
        mine = waits.rank == rank
        rows = np.flatnonzero(np.array([part == _COMMUNICATION for part in there.part], bool))
        begin, end = there.spans.begin[rows], there.spans.end[rows]
        alone = np.where(counted[rank].within(begin, end) > 0, there.alone[rows], 0)
        waited = np.minimum(Cover(waits.begin[mine], waits.end[mine]).within(begin, end), alone)
        behind = np.char.endswith(there.spans.name[rows].astype(str), ".wait")
        behind |= np.isin(begin, background.started[background.rank == rank])
        sums += [waited.sum(), (alone - waited)[behind].sum(), (alone - waited)[~behind].sum()]
    number = max(sum(len(begin) for begin, _ in steps.values()), 1)
    whole = sum(float((end - begin).sum()) for begin, end in steps.values())
    held = [one for one in _late_ranks(followed(waits), pieces, steps, whole / number) if one.share >= WORTH]
    late, exposed, direct = (sums / number).tolist()
    return ProgramWaits(late, exposed, direct, tuple(sorted(held, key=lambda one: (-one.share, one.rank))))


def _within_steps(waits: WaitTable, counted: Mapping[int, Cover]) -> WaitTable:
    tables = []
    for rank, cover in counted.items():
        own = waits.where(waits.rank == rank)
        row, begin, end, _ = overlapping(own.begin, own.end, cover.begin, cover.end)
        tables.append(WaitTable(own.rank[row], begin, end, own.cause[row]))
    return WaitTable.joined(*tables)


def _late_ranks(
    waits: WaitTable, pieces: Mapping[int, Pieces], steps: Mapping[int, tuple[Column, Column]], mean: float
) -> Iterator[LateRank]:
    """Yield what each rank does while others wait for it, where that is no chance."""
    longest: dict[tuple[int, str], float] = {}
    ranks: dict[tuple[int, str], list[int]] = {}
    lost: dict[tuple[int, str], Column] = {}
    often: dict[int, int] = {}
    for cause, rank in sorted({*zip(waits.cause.tolist(), waits.rank.tolist(), strict=True)}):
        mine = (waits.cause == cause) & (waits.rank == rank)
        cover, (begin, end) = Cover(waits.begin[mine], waits.end[mine]), steps[rank]
        often[cause] = max(often.get(cause, 0), int((cover.within(begin, end) > 0).sum()))
        for doing, spent in _doing(cover, pieces[cause], steps[cause][0]).items():
            key = cause, doing
            longest[key] = max(longest.get(key, 0.0), float(spent.sum()) / max(len(begin), 1))
            ranks.setdefault(key, []).append(rank)
            lost[key] = np.maximum(lost.get(key, 0), spent)
    for cause, doing in unlikely(lost, {rank: {REST, *own.part} for rank, own in pieces.items()}):
        wait = longest[cause, doing]
        yield LateRank(cause, doing, wait, wait / max(mean, 1e-9), tuple(ranks[cause, doing]), often[cause])


def _doing(waited: Cover, pieces: Pieces, steps: Column) -> dict[str, Column]:
    """Divide waits for a rank by what it did then, in each of its steps, which begin there.

    Where it communicated, it waited for the network as others do.
    """
    spans, outer = pieces.spans, pieces.outer
    inside = waited.within(spans.begin, spans.end)
    alone = inside.copy()
    np.subtract.at(alone, outer[outer >= 0], inside[outer >= 0])
    step = np.maximum(np.searchsorted(steps, spans.begin, side="right") - 1, 0)
    ever = np.iinfo(np.int64).max // 4
    rest = waited.within(np.append(-ever, steps[1:]), np.append(steps[1:], ever))
    np.subtract.at(rest, step[outer < 0], inside[outer < 0])
    parts = np.array(pieces.part, object)
    found = {REST: rest}
    for part in {*pieces.part} - {_COMMUNICATION}:
        own = parts == part
        found[part] = found.get(part, 0) + np.bincount(step[own], alone[own], len(steps))
    return {part: spent for part, spent in found.items() if spent.sum() > 0}
