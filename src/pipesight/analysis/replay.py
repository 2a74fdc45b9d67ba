"""Replay recorded operations with other durations: many scenarios at once, as columns of a matrix, level by level.

    begin of a unit        the latest end of what its operations wait for
    end of an operation    that, and its own duration; of a communication, its transfer

Nothing else takes time, so what no dependency explains, such as the launching of operations, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.operation_graph import OperationGraph
from pipesight.runs.reading.event_tables import Column

__all__ = ["Scenarios", "replay", "transfers"]

CELLS = 2_000_000
"""Ends of operations, over some scenarios, that are computed at once: about as many as stay in a processor's cache."""
FEW = 8
"""Up to so many sources of any unit, they are compared one after the other: NumPy reduces short groups slowly."""


@dataclass(frozen=True, slots=True, eq=False)
class Scenarios:
    """Durations of operations, one column per scenario.

    First come the columns of ``whole``. In the others, operations have ideal durations, but for those that a column
    keeps as they were: ``kept`` has, for each operation, the columns that keep it.
    """

    recorded: Column
    ideal: Column
    whole: Sequence[Column]
    """Durations of all operations, for one scenario each."""
    kept: Sequence[Column] = ()
    """Numbers of columns, those of ``whole`` included."""
    count: int = 0
    """How many columns there are."""

    def of_rows(self, rows: slice) -> Scenarios:
        """Return the scenarios of some operations."""
        return Scenarios(
            self.recorded[rows],
            self.ideal[rows],
            [durations[rows] for durations in self.whole],
            [columns[rows] for columns in self.kept],
            self.count,
        )


def transfers(graph: OperationGraph, begin: Column, duration: Column) -> Column:
    """Return durations without waiting for peers: from the latest begin among the operations of a unit to the end."""
    latest = np.full(int(graph.unit[-1]) + 1, -np.inf)
    own = begin[graph.row]
    np.maximum.at(latest, graph.unit, own)
    found = np.empty(len(begin))
    found[graph.row] = np.maximum(own + duration[graph.row] - latest[graph.unit], 0.0)
    return found


def replay(graph: OperationGraph, scenarios: Scenarios) -> Column:
    """Return how long each step takes, a row per step and a column per scenario."""
    found = np.empty((len(graph.first_last), scenarios.count))
    width = max(CELLS // len(graph.row), len(scenarios.whole))
    for first in range(0, scenarios.count, width):
        columns = range(first, min(first + width, scenarios.count))
        ends = _ends(graph, scenarios, columns)
        np.maximum.reduceat(ends[graph.last], graph.first_last, axis=0, out=found[:, first : columns.stop])
    return found


def _ends(graph: OperationGraph, scenarios: Scenarios, columns: range) -> Column:
    """Return when operations end in some scenarios."""
    ends = np.empty((len(graph.row), len(columns)))
    ideal, own = scenarios.ideal[graph.row, None], (scenarios.recorded - scenarios.ideal)[graph.row]
    whole = [durations[graph.row] for durations in scenarios.whole[columns.start : columns.stop]]
    kept = [numbers[graph.row] - columns.start for numbers in scenarios.kept]
    inside = [np.flatnonzero((numbers >= 0) & (numbers < len(columns))) for numbers in kept]
    for first_unit, end_unit, first, end in graph.levels:
        now, sources = ends[first:end], graph.first_source[first_unit : end_unit + 1]
        if sources[0] == sources[-1]:
            now[:] = 0.0
        else:
            begins = _latest(ends, graph.source, sources)
            np.take(begins, graph.unit[first:end] - first_unit, axis=0, out=now)
        for column, durations in enumerate(whole):
            now[:, column] += durations[first:end]
        now[:, len(whole) :] += ideal[first:end]
        for numbers, rows in zip(kept, inside, strict=True):
            mine = rows[np.searchsorted(rows, first) : np.searchsorted(rows, end)]
            ends[mine, numbers[mine]] += own[mine]
    return ends


def _latest(ends: Column, source: Column, bounds: Column) -> Column:
    """Return the latest end among the sources of each unit; the sources of each begin at one of ``bounds``."""
    count = np.diff(bounds)
    if count.max() > FEW:
        found: Column = np.maximum.reduceat(ends[source[bounds[0] : bounds[-1]]], bounds[:-1] - bounds[0], axis=0)
        return found
    found = ends[source[bounds[:-1]]]
    for k in range(1, count.max()):
        more = slice(None) if count.min() > k else np.flatnonzero(count > k)
        found[more] = np.maximum(found[more], ends[source[bounds[:-1][more] + k]])
    return found
