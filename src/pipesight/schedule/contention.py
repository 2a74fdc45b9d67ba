"""How much devices slow each other down: partitions on one CPU share its processors, and the GIL.

While k tasks run at once, each computes at the rate r(k): 1 for one alone, at most p / k on p processors. So the work
of a task, in the time that it would take alone, is::

    work = sum over k of r(k) x (how long it ran while k tasks did)

Tasks of a kind on a partition have equal work, whatever runs at the same time. That gives the rates, since some of them
run while others wait: the first forward of a batch runs alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Concurrency", "rate_of", "rates_of"]

LEAST = 0.5
"""The least rate, relative to an even share of the processors; a lower one has other causes than sharing."""
SOME = 0.5
"""The least slowdown, relative to that of tasks that need a processor each; with less, they wait for something else."""
ENOUGH = 64
"""The number of mini-batches that the rates are estimated from."""

_Times = NDArray[np.float64]


def rate_of(rates: Sequence[float], count: int) -> float:
    """Return how fast each of several tasks computes, given the rates of 1, 2, ...; beyond, the total stays the same.

    >>> rate_of((1.0, 1.0), 2), rate_of((1.0, 1.0), 4), rate_of((), 4)
    (1.0, 0.5, 1.0)
    """
    if not rates or count < 1:
        return 1.0
    return float(rates[count - 1]) if count <= len(rates) else float(rates[-1]) * len(rates) / count


class Concurrency:
    """How many tasks run at any time, in mini-batches with equally many tasks: one row each, times in any unit."""

    def __init__(self, begin: NDArray[np.int64] | _Times, end: NDArray[np.int64] | _Times) -> None:
        tasks = begin.shape[1]
        times = np.concatenate([end, begin], axis=1).astype(float)  # at equal times, ends come before begins
        order = np.argsort(times, axis=1, kind="stable")
        self._place = np.argsort(order, axis=1, kind="stable")
        self._tasks = tasks
        times = np.take_along_axis(times, order, axis=1)
        self._lengths = np.diff(times, axis=1)
        self._level = np.cumsum(np.where(order < tasks, -1, 1), axis=1)[:, :-1]

    @property
    def most(self) -> int:
        """The most tasks that run at once."""
        return int(self._level.max(initial=1))

    def work(self, rates: Sequence[float]) -> _Times:
        """Return how long each task would take alone."""
        return self._within(np.array([0.0, *(rate_of(rates, k) for k in range(1, self.most + 1))]))

    def _within(self, value: _Times) -> _Times:
        """Return the integral over each task of a value that depends on how many run."""
        done = np.zeros((len(self._level), self._level.shape[1] + 1))
        np.cumsum(value[np.maximum(self._level, 0)] * self._lengths, axis=1, out=done[:, 1:])
        at = np.take_along_axis(done, self._place, axis=1)
        return np.asarray(at[:, : self._tasks] - at[:, self._tasks :])

    def shares(self) -> _Times:
        """Return the share of each task's time in which 1, 2, ... tasks ran: by mini-batch, task and number."""
        each = np.stack([self._within(row) for row in np.eye(self.most + 1)[1:]], axis=-1)
        return np.asarray(each / np.maximum(each.sum(axis=-1, keepdims=True), 1e-9))


def rates_of(
    begin: NDArray[np.int64], end: NDArray[np.int64], kinds: NDArray[np.int64], processors: int
) -> tuple[float, ...]:
    """Estimate how fast each of 1, 2, ... tasks computes that run at once.

    ``begin`` and ``end`` are of each task, by mini-batch; those with the same number in ``kinds`` have equal work.
    Together they are no faster than the ``processors`` they share, unless they visibly do not slow down.
    """
    few = slice(None, None, -(-len(begin) // ENOUGH))
    begin, end, kinds = begin[few], end[few], kinds[few]
    crowd = Concurrency(begin, end)
    most = crowd.most
    even = np.minimum(1.0, processors / np.arange(1, most + 1))
    if most <= processors:
        return tuple(np.ones(processors).tolist())
    long = (end > begin).ravel()  # one of no length ran beside nobody
    if not long.any():
        return tuple(np.ones(most).tolist())
    lengths, which = np.log((end - begin).ravel()[long]), np.unique(kinds.ravel()[long], return_inverse=True)[1]
    shares = crowd.shares().reshape(-1, most)[long]
    expected = -np.log(shares @ even)[:, None]
    if _varies(expected, which) and _within_groups(lengths, expected, which)[0] < SOME:
        return tuple(np.ones(most).tolist())  # they wait for something other than processors
    slower = _within_groups(lengths, shares[:, 1:], which)
    rates = np.clip(np.concatenate([[1.0], np.exp(-slower)]), LEAST * even, even)
    return tuple(np.minimum.accumulate(rates).tolist())


def _varies(cause: _Times, group: NDArray[np.int64]) -> bool:
    """Return whether a cause varies within groups, so that its effect can be estimated."""
    means = np.bincount(group, cause[:, 0]) / np.bincount(group)
    return bool(np.std(cause[:, 0] - means[group]) > 0.01)


def _within_groups(values: _Times, causes: _Times, group: NDArray[np.int64]) -> _Times:
    """Return the effect of each cause on a value by least squares, with a separate level for each group."""
    count = np.bincount(group)
    values = values - (np.bincount(group, values) / count)[group]
    causes = causes - np.stack([np.bincount(group, cause) / count for cause in causes.T])[:, group].T
    return np.asarray(np.linalg.lstsq(causes, values, rcond=1e-6)[0])
