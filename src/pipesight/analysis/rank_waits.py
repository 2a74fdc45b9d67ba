"""Waits of ranks for each other, attributed to what the late rank was doing.

A loader that is slow on one rank keeps all others waiting in the next collective. That is no communication: the others
wait for the loader. So in these times, each rank counts as doing what the rank did that it waited for, and that one may
itself have waited for another. ::

    rank 0   | optimizer |  all_gather ...............|         data loading, on rank 3
    rank 3   | optimizer |       data loading         |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipesight.analysis.chance import loses_most
from pipesight.analysis.collectives import WaitTable
from pipesight.analysis.step_breakdown import KINDS, Cover, overlapping
from pipesight.analysis.step_grouping import MiniBatchTable
from pipesight.analysis.step_times import StepTimes
from pipesight.runs.reading.event_codes import COMMUNICATION
from pipesight.runs.reading.event_tables import Column, Spans, Table

__all__ = ["WORTH", "LateRank", "RankWaits", "followed", "unlikely"]

WORTH = 0.05
"""The share of the mean step that a wait must cost to be named."""
_Table = TypeVar("_Table", bound=Table)
_CHAIN = 8  # ranks in a chain, each waiting for the next


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that keeps others waiting. Times are microseconds."""

    rank: int
    """The rank that arrives late."""
    doing: str
    """A part of a step, such as ``data_loading``; ``computing`` if it is slower than other replicas."""
    wait: float
    """How long the rank that waits longest for it waits in the mean step."""
    share: float
    """Of the mean step."""
    ranks: tuple[int, ...]
    """The ranks that wait."""
    steps: int
    """The steps in which they wait."""


class RankWaits:
    """What ranks did while others waited for them."""

    def __init__(
        self, pieces: WaitTable, spans: Spans, minibatches: MiniBatchTable, replicas: Mapping[int, int]
    ) -> None:
        self._spans, self._replicas = spans, replicas
        self._windows = {
            number: Cover(minibatches.begin[own], minibatches.end[own])
            for number in {*replicas.values()}
            for own in [minibatches.replica == number]
        }
        direct = [self._outside_windows(own) for own in _by(pieces, "rank").values()]
        self.pieces = followed(_joined(direct))
        """Who waited for whom in the end, outside of windows."""

    def _outside_windows(self, pieces: WaitTable) -> WaitTable:
        windows = self._windows.get(self._replicas.get(int(pieces.rank[0]), -1))
        return pieces if windows is None else _inside(pieces, windows.complement())

    def _by_doing(self, pieces: WaitTable, cause: int) -> dict[str, WaitTable]:
        """Divide waits for one rank by what it did then."""
        found = {}
        spans = self._spans.where(self._spans.rank == cause)
        covers = {"computing": self._windows.get(self._replicas.get(cause, -1), Cover(spans.begin[:0], spans.end[:0]))}
        for kind, name in KINDS.items():
            covers[name] = Cover(spans.begin[spans.kind == kind], spans.end[spans.kind == kind])
        for name, cover in covers.items():
            found[name] = _inside(pieces, cover)
            pieces = _inside(pieces, cover.complement())
        return {**found, "between_steps": pieces}

    def attributed(self) -> Spans:
        """Return the spans with what ranks waited for in place of their waits."""
        spans = self._spans
        tables = [spans.where(spans.kind != COMMUNICATION)]
        waits = _by(self.pieces, "rank")
        for rank, own in _by(spans.where(spans.kind == COMMUNICATION), "rank").items():
            if rank not in waits:
                tables.append(own)
                continue
            rest = Cover(waits[rank].begin, waits[rank].end).complement()
            tables.append(_spans(rank, COMMUNICATION, *_overlaps(own.begin, own.end, rest)[1:]))
            for cause, mine in _by(waits[rank], "cause").items():
                doing = self._by_doing(mine, cause)
                # Replicas that compute longer than others keep these waiting: that stays communication.
                tables.append(_spans(rank, COMMUNICATION, doing["computing"].begin, doing["computing"].end))
                tables += [_spans(rank, kind, doing[name].begin, doing[name].end) for kind, name in KINDS.items()]
        joined = Spans.joined(*tables)
        return joined.where(np.lexsort((joined.begin, joined.rank)))

    def _doing(self) -> dict[int, set[str]]:
        ranks = {*self._replicas, *self.pieces.cause.tolist()}
        own = {rank: {*self._spans.kind[self._spans.rank == rank].tolist()} for rank in ranks}
        return {
            rank: {"computing", "between_steps", *(name for kind, name in KINDS.items() if kind in kinds)}
            for rank, kinds in own.items()
        }

    def held(self, times: StepTimes) -> tuple[LateRank, ...]:
        """Return the ranks that keep others waiting in these steps by more than chance, those that cost most first."""
        lost, ranks = {}, {}
        mean = max(float(times.period.mean()), 1e-9) if len(times) else 1.0
        steps, which = np.unique(times.step, return_inverse=True)
        for cause, mine in _by(self.pieces, "cause").items():
            for name, pieces in self._by_doing(mine, cause).items():
                if name == "communication":
                    continue  # it waits for the network, as the others do
                longest, waiting = np.zeros(len(times)), []
                for rank, own in _by(pieces, "rank").items():
                    rows = np.flatnonzero(times.replica == self._replicas.get(rank, -1))
                    ends = times.begin[rows] + times.period[rows]
                    waited = Cover(own.begin, own.end).within(times.begin[rows], ends)
                    longest[rows] = np.maximum(longest[rows], waited)
                    waiting += [rank] * bool(waited.any())
                per_step = np.zeros(len(steps))
                np.maximum.at(per_step, which, longest)
                lost[cause, name], ranks[cause, name] = per_step, tuple(waiting)
        found = []
        for cause, name in unlikely(lost, self._doing()):
            wait, often = float(lost[cause, name].mean()), int((lost[cause, name] > 0).sum())
            if wait >= WORTH * mean:
                found.append(LateRank(cause, name, wait, wait / mean, ranks[cause, name], often))
        return tuple(sorted(found, key=lambda entry: (-entry.share, entry.rank)))


def unlikely(lost: Mapping[tuple[int, str], Column], doing: Mapping[int, Set[str]]) -> Iterator[tuple[int, str]]:
    """Yield which ranks keep others waiting by what they do more than ranks that do the same would by chance.

    Args:
        lost: What the others lose in each step, by rank and what it does meanwhile.
        doing: What each rank does at all: what no other does is no chance.
    """
    kinds = {kind for _, kind in lost}
    for kind in sorted(kinds):
        ranks = [rank for rank, all_ in sorted(doing.items()) if kind in all_ or (rank, kind) in lost]
        steps = min(len(own) for (_, name), own in lost.items() if name == kind)
        rows = np.array([lost.get((rank, kind), np.zeros(steps))[:steps] for rank in ranks])
        for place, rank in enumerate(ranks):
            if rows[place].any() and loses_most(rows, place, kinds=len(kinds)):
                yield rank, kind


def followed(pieces: WaitTable) -> WaitTable:
    """Return waits with another cause where the cause waited, too: the rank that it waited for."""
    waits, found = _by(pieces, "rank"), []
    for _ in range(_CHAIN):
        further = []
        for cause, mine in _by(pieces, "cause").items():
            if cause not in waits:
                found.append(mine)
                continue
            theirs = waits[cause].where(np.argsort(waits[cause].begin, kind="stable"))
            found.append(_inside(mine, Cover(theirs.begin, theirs.end).complement()))
            row, begin, end, which = overlapping(mine.begin, mine.end, theirs.begin, theirs.end)
            further.append(WaitTable(mine.rank[row], begin, end, theirs.cause[which]))
        pieces = _joined(further)
        pieces = pieces.where(pieces.rank != pieces.cause)
        if not len(pieces):
            break
    return _joined([*found, pieces])


def _joined(tables: Sequence[WaitTable]) -> WaitTable:
    return WaitTable.joined(WaitTable(*[np.zeros(0, np.int64)] * 4), *tables)


def _by(table: _Table, column: str) -> dict[int, _Table]:
    """Divide a table by the values of a column."""
    values = getattr(table, column)
    return {value: table.where(values == value) for value in np.unique(values).tolist()}


def _spans(rank: int, kind: int, begin: Column, end: Column) -> Spans:
    return Spans(np.full(len(begin), rank, np.int64), np.full(len(begin), kind, np.int64), begin, end)


def _inside(pieces: WaitTable, times: tuple[Column, Column] | Cover) -> WaitTable:
    """Return what of the pieces lies in some times."""
    row, begin, end = _overlaps(pieces.begin, pieces.end, times)
    return WaitTable(pieces.rank[row], begin, end, pieces.cause[row])


def _overlaps(begin: Column, end: Column, times: tuple[Column, Column] | Cover) -> tuple[Column, Column, Column]:
    other = (times.begin, times.end) if isinstance(times, Cover) else times
    return overlapping(begin, end, *other)[:3]
