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
    ends = np.empty((len(graph.row), scenarios.count))
    ideal, own = scenarios.ideal[graph.row], (scenarios.recorded - scenarios.ideal)[graph.row]
    whole = np.stack([durations[graph.row] for durations in scenarios.whole], axis=1)
    kept = [columns[graph.row] for columns in scenarios.kept]
    given = whole.shape[1]
    for first_unit, end_unit, first, end in graph.levels:
        now = ends[first:end]
        sources = graph.first_source[first_unit : end_unit + 1]
        if sources[0] == sources[-1]:
            now[:] = 0.0
        else:
            waited_for = ends[graph.source[sources[0] : sources[-1]]]
            begins = np.maximum.reduceat(waited_for, sources[:-1] - sources[0], axis=0)
            now[:] = begins[graph.unit[first:end] - first_unit]
        now[:, :given] += whole[first:end]
        now[:, given:] += ideal[first:end, None]
        rows = np.arange(end - first)
        for columns in kept:
            now[rows, columns[first:end]] += own[first:end]
    found: Column = np.maximum.reduceat(ends[graph.last], graph.first_last, axis=0)
    return found
