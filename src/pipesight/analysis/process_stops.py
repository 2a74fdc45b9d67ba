"""When processes were stopped, as their recordings say: they neither computed nor waited for others then."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from pipesight.analysis.step_breakdown import Cover
from pipesight.runs.format import STOPPED
from pipesight.runs.reading.event_tables import Column, Points

__all__ = ["resumed", "stops_in"]


def stops_in(points: Points) -> dict[int, Cover]:
    """Return when the processes of ranks were stopped, by rank."""
    own = points.where((points.category == "instant") & (points.name == STOPPED))
    found = {}
    for rank in np.unique(own.rank).tolist():
        mine = own.where(own.rank == rank)
        took = np.array([_microseconds(text) for text in mine.values.tolist()], np.int64)
        found[int(rank)] = Cover(mine.begin - took, mine.begin)
    return found


def _microseconds(text: object) -> int:
    try:
        return max(int(json.loads(str(text))["microseconds"]), 0)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def resumed(stops: Mapping[int, Cover], rank: Column, begin: Column, end: Column) -> Column:
    """Return when ranks began to wait if waits began after the last stop in them."""
    found = begin.copy()
    for stopped, cover in stops.items():
        rows = np.flatnonzero(rank == stopped)
        at = np.searchsorted(cover.begin, end[rows], side="left") - 1
        last = np.where(at >= 0, cover.end[at], 0)
        found[rows] = np.maximum(begin[rows], np.minimum(last, end[rows]))
    return found
