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

from pipesight.analysis.collectives import WaitTable
from pipesight.analysis.program_time import REST, Pieces
from pipesight.analysis.rank_waits import WORTH, LateRank, followed
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
    """Waiting for collectives in the background, once all ranks are there."""
    direct: float = 0.0
    """In collectives that the main thread waits for at once, once all ranks are there."""
    held: tuple[LateRank, ...] = ()
    """The ranks that come late, those that cost most first."""


def program_waits(
    waits: WaitTable, pieces: Mapping[int, Pieces], steps: Mapping[int, tuple[Column, Column]]
) -> ProgramWaits:
    """Divide the communication of the steps that count.

    ``steps`` are when those that count begin and end, by rank.
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
    """Yield what each rank does while others wait for it."""
    for cause in np.unique(waits.cause).tolist():
        longest: dict[str, float] = {}
        ranks: dict[str, list[int]] = {}
        often = 0
        for rank in np.unique(waits.rank[waits.cause == cause]).tolist():
            mine = (waits.cause == cause) & (waits.rank == rank)
            cover, (begin, end) = Cover(waits.begin[mine], waits.end[mine]), steps[rank]
            often = max(often, int((cover.within(begin, end) > 0).sum()))
            for doing, spent in _doing(cover, pieces[cause]).items():
                longest[doing] = max(longest.get(doing, 0.0), spent / max(len(begin), 1))
                ranks.setdefault(doing, []).append(rank)
        for doing, wait in longest.items():
            yield LateRank(cause, doing, wait, wait / max(mean, 1e-9), tuple(ranks[doing]), often)


def _doing(waited: Cover, pieces: Pieces) -> dict[str, float]:
    """Divide waits for a rank by what it did then; where it communicated, it waited for the network as others do."""
    inside = waited.within(pieces.spans.begin, pieces.spans.end)
    outer = pieces.outer
    alone = inside.copy()
    np.subtract.at(alone, outer[outer >= 0], inside[outer >= 0])
    found = {REST: float(waited.total - inside[outer < 0].sum())}
    for part, spent in zip(pieces.part, alone.tolist(), strict=True):
        found[part] = found.get(part, 0.0) + spent
    return {part: spent for part, spent in found.items() if spent > 0 and part != _COMMUNICATION}
