"""Counters over steps: the loss, the learning rate, and every counter of the user's own.

A value belongs to the step in which it was recorded, by its time. A step's value is the mean of those recorded in it;
where one of them is not finite, so is the step's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesight.runs.reading.event_tables import Column, Points, Table

__all__ = ["Curve", "Moment", "StepEdges", "curves_of", "moments_of"]

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Curve:
    """One value of a counter over steps, as a mean over ranks."""

    name: str
    """The counter's; with that of the value, if it has several."""
    steps: tuple[int, ...]
    """In rising order; only those in which it was recorded."""
    values: tuple[float, ...]
    """One for each step; NaN and infinities as they were recorded."""

    @property
    def first_nonfinite(self) -> int | None:
        """The first step with a value that is not finite."""
        return next(
            (step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)), None
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """An instant of the user's own."""

    name: str
    """As it was recorded."""
    rank: int
    """That recorded it."""
    step: int
    """In which it lies."""
    time: int
    """In microseconds, by the clock of rank 0."""
    values: str
    """Its arguments, as JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEdges(Table):
    """When the steps of each rank begin, by rank and begin."""

    rank: Column
    step: Column
    begin: Column


def curves_of(points: Points, edges: StepEdges) -> tuple[Curve, ...]:
    """Return the curves of all counters, by name: the loss and the learning rate come first."""
    own = points.where(points.category == "counter")
    steps = steps_of(own, edges)
    sums: dict[tuple[str, str], dict[int, list[float]]] = {}
    for name, text, step in zip(own.name.tolist(), own.values.tolist(), steps.tolist(), strict=True):
        if step is None:
            continue
        for key, value in _values(text):
            sums.setdefault((str(name), key), {}).setdefault(step, []).append(value)
    many = {name for name, _ in sums if sum(other == name for other, _ in sums) > 1}
    found = []
    for (name, key), by_step in sums.items():
        numbers = tuple(sorted(by_step))
        means = tuple(_mean(by_step[step]) for step in numbers)
        found.append(Curve(f"{name} {key}" if name in many else name, numbers, means))
    first = {"loss": 0, "learning rate": 1}
    return tuple(sorted(found, key=lambda curve: (first.get(curve.name, 2), curve.name)))


def moments_of(points: Points, edges: StepEdges) -> tuple[Moment, ...]:
    """Return the instants, by time."""
    own = points.where(points.category == "instant")
    rows = zip(
        own.name.tolist(),
        own.rank.tolist(),
        steps_of(own, edges).tolist(),
        own.begin.tolist(),
        own.values.tolist(),
        strict=True,
    )
    found = [Moment(str(n), int(r), int(s), int(t), str(v)) for n, r, s, t, v in rows if s is not None]
    return tuple(sorted(found, key=lambda moment: (moment.time, moment.rank)))


def steps_of(points: Points, edges: StepEdges) -> Column:
    """Return the number of the step in which each lies; ``None`` before the first."""
    found = np.full(len(points), None, object)
    for rank in np.unique(points.rank):
        mine, own = np.flatnonzero(points.rank == rank), edges.where(edges.rank == rank)
        place = np.searchsorted(own.begin, points.begin[mine], side="right") - 1
        inside = place >= 0
        found[mine[inside]] = own.step[place[inside]].astype(object)
    return found


def _values(text: Any) -> list[tuple[str, float]]:
    """Return the numbers in the JSON of a counter."""
    try:
        given = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return []
    found = []
    for key, value in given.items() if isinstance(given, dict) else ():
        number = _WORDS.get(value) if isinstance(value, str) else value
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            found.append((str(key), float(number)))
    return found


def _mean(values: Sequence[float]) -> float:
    if len(values) > 1 and math.inf in values and -math.inf in values:
        return math.nan
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)
