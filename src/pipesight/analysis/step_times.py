"""The times of complete steps and their parts, summaries over steps, and which of the first ones are warm-up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesight.analysis.bubble_losses import LOSSES
from pipesight.runs.reading.event_tables import Column, data_frame

__all__ = ["OUTSIDE", "PARTS", "StepTimes", "Summary", "slow_first", "summary", "warm_up"]

OUTSIDE = ("evaluation", "data_loading", "optimizer", "checkpoints", "communication", "between_steps")
"""What a step does outside the windows of its mini-batches."""
PARTS = ("computing", *LOSSES, *OUTSIDE)
"""All parts of a step."""

WARM_UP = 1.5
"""Steps at the beginning that take this many times the median of those around them are warm-up."""
FIRST = 10
"""The most steps that can be warm-up."""
AROUND = 5
"""The median is taken over this many times as many steps."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A quantity over steps: its median, and where the middle 80% lie."""

    median: float
    """The median."""
    low: float
    """The 10th percentile."""
    high: float
    """The 90th percentile."""
    mean: float
    """The mean."""
    least: float
    """The smallest value."""
    most: float
    """The largest value."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Complete steps, one after the other; times in microseconds. The ``parts`` of a step add up to its ``period``."""

    replica: Column
    """The replica that ran the step."""
    step: Column
    """Its number."""
    begin: Column
    """When its first forward began."""
    period: Column
    """From there to the first forward of the next step."""
    follows: Column
    """Whether the period ends where the next step begins; of others, not all was recorded."""
    window: Column
    """The sum over its mini-batches."""
    minibatches: Column
    """How many it has."""
    microbatches: Column
    """How many it has."""
    samples: Column
    """How many it has; -1 if that was not recorded."""
    bubble: NDArray[np.float64]
    """The share of its windows in which partitions are idle."""
    bound: NDArray[np.float64]
    """The bubble of its schedule alone."""
    turnaround: NDArray[np.float64]
    """The part of the host gaps between forward and backward."""
    parts: NDArray[np.float64]
    """By part, in the order of `PARTS`, and step."""

    def __len__(self) -> int:
        return len(self.step)

    def where(self, rows: Column) -> StepTimes:
        """Return some of the steps."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return StepTimes(**{name: column[..., rows] for name, column in columns.items()})

    def to_pandas(self) -> Any:
        """Return a pandas ``DataFrame`` with a row for each step; each part is a column."""
        own = (field.name for field in fields(self) if field.name != "parts")
        return data_frame({name: getattr(self, name) for name in own} | dict(zip(PARTS, self.parts, strict=True)))

    def mean_parts(self) -> dict[str, float]:
        """Return the parts of the mean step, by name."""
        return {name: float(part.mean()) for name, part in zip(PARTS, self.parts, strict=True)}

    def over_replicas(self) -> StepTimes:
        """Return one row a step, by number: it takes as long as its slowest replica; shares and parts are means."""
        numbers, which = np.unique(self.step, return_inverse=True)
        count = np.bincount(which)

        def mean(values: NDArray[Any]) -> NDArray[np.float64]:
            return np.bincount(which, values, len(numbers)) / count

        def total(values: Column) -> Column:
            return np.bincount(which, values, len(numbers)).astype(np.int64)

        period = np.zeros(len(numbers), np.int64)
        np.maximum.at(period, which, self.period)
        begin = np.full(len(numbers), np.iinfo(np.int64).max)
        np.minimum.at(begin, which, self.begin)
        return StepTimes(
            replica=np.zeros(len(numbers), np.int64),
            step=numbers,
            begin=begin,
            period=period,
            follows=total(self.follows) == count,
            window=mean(self.window).astype(np.int64),
            minibatches=total(self.minibatches),
            microbatches=total(self.microbatches),
            samples=np.where(total(self.samples < 0) > 0, -1, total(self.samples)),
            bubble=mean(self.bubble),
            bound=mean(self.bound),
            turnaround=mean(self.turnaround),
            parts=np.stack([mean(part) for part in self.parts]),
        )

    @classmethod
    def none(cls) -> StepTimes:
        """Return no steps."""
        columns: dict[str, Any] = {field.name: np.zeros(0, np.int64) for field in fields(cls)}
        return cls(**{**columns, "bubble": np.zeros(0), "bound": np.zeros(0), "parts": np.zeros((len(PARTS), 0))})


def warm_up(times: StepTimes) -> Column:
    """Return the numbers of the first steps that took much longer than those after them.

    They are three at most, or a tenth of all steps, up to `FIRST`. A run that is slow for longer was slow: its
    first steps are compared with those that come next, not with what the run came to in the end.
    """
    merged = times.over_replicas()
    return slow_first(merged.step, merged.period)


def slow_first(numbers: Column, period: Column) -> Column:
    """Return which of the first steps are warm-up, as `warm_up` does, given the numbers of steps and their times."""
    if len(numbers) < 5:
        return numbers[:0]
    most = max(3, min(len(numbers) // 10, FIRST))
    slow = period > WARM_UP * np.median(period[: AROUND * most])
    return numbers[: min(int(np.argmin(slow)), most)]


def summary(values: Column) -> Summary:
    """Summarise a quantity over steps.

    >>> summary(np.array([1, 2, 3])).median
    2.0
    """
    low, median, high = np.quantile(values, [0.1, 0.5, 0.9]).tolist()
    return Summary(median, low, high, float(values.mean()), float(values.min()), float(values.max()))
