"""``torchgpipe.balance.blockpartition``, for pipesight: consecutive blocks of a sequence."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from pipesight.balance import balance_cost

__all__ = ["solve"]

T = TypeVar("T", int, float)


def solve(sequence: Sequence[T], partitions: int = 1) -> list[list[T]]:
    """Cut ``sequence`` into ``partitions`` blocks so that the largest sum is as small as possible.

    Example::

        >>> solve([1, 2, 3, 4, 5, 6], partitions=2)
        [[1, 2, 3, 4], [5, 6]]
    """
    ends = accumulate(balance_cost(sequence, partitions), initial=0)
    return [list(sequence[begin:end]) for begin, end in pairwise(ends)]
