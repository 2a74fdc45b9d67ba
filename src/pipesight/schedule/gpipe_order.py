"""The order of the tasks of one mini-batch.

With m micro-batches (i) and n partitions (j), GPipe runs all forwards, then all backwards in reverse. Clock by clock,
for m = 4 and n = 3, ``F`` forward and ``B`` backward::

    k            0   1   2   3   4   5     6   7   8   9  10  11
    partition 0  F0  F1  F2  F3                    B3  B2  B1  B0
    partition 1      F0  F1  F2  F3            B3  B2  B1  B0
    partition 2          F0  F1  F2  F3    B3  B2  B1  B0

The engine follows no clock: a worker takes its tasks in this order, each as soon as its input is there. Every worker
keeps to one order of all tasks, so none can wait for another that waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

__all__ = ["backward_tasks", "clock_cycles", "forward_tasks"]


@functools.lru_cache
def forward_tasks(m: int, partitions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the forward tasks ``(i, j)`` of some partitions, in the order in which one worker runs them.

    >>> forward_tasks(3, (1,))
    ((0, 1), (1, 1), (2, 1))
    >>> forward_tasks(2, (0, 1))
    ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    return tuple((i, j) for clock in clock_cycles(m, max(partitions) + 1) for i, j in clock if j in partitions)


@functools.lru_cache
def backward_tasks(m: int, partitions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the backward tasks ``(i, j)`` of some partitions, in the order in which one worker runs them.

    The last micro-batch comes first: with ``except_last`` its activations are at hand, so no worker starts with a
    recomputation.

    >>> backward_tasks(3, (1,))
    ((2, 1), (1, 1), (0, 1))
    """
    return forward_tasks(m, partitions)[::-1]


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, clock by clock, the tasks ``(i, j)`` that can run side by side in a forward pass.

    >>> list(clock_cycles(2, 2))
    [[(0, 0)], [(1, 0), (0, 1)], [(1, 1)]]
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(n, k + 1))]
