"""Balance layers: cut a list of costs into contiguous blocks so that the largest sum is as small as possible."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["balance_cost", "check_partitions"]


def balance_cost(costs: Sequence[float], partitions: int) -> list[int]:
    """Return how many consecutive layers each partition gets, so that the costliest partition costs least.

    Example::

        >>> balance_cost([1, 1, 1, 1, 6, 2], partitions=3)
        [4, 1, 1]

    No partition is empty, and no other cut has a smaller largest sum. Among the cuts that share this sum, the
    result is the most even one: the least sum of squared partition costs, then of squared layer counts.

    Args:
        costs: Cost of each layer, in any unit. Sums are exact, of floats too.
        partitions: Number of partitions.

    Raises:
        ValueError: ``partitions`` is not a positive integer, or exceeds the number of layers, or a cost is
            negative, infinite or NaN.
    """
    check_partitions(len(costs), partitions)
    prefix = [0, *accumulate(_as_integers(costs))]
    return _most_even(prefix, partitions, _smallest_bound(prefix, partitions))


def check_partitions(layers: int, partitions: int) -> None:
    """Raise ``ValueError`` unless ``layers`` can be cut into ``partitions`` blocks that are not empty."""
    if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
        raise ValueError(f"partitions must be a positive integer (partitions: {partitions!r})")
    if partitions > layers:
        raise ValueError(f"too few layers for the partitions (layers: {layers}, partitions: {partitions})")


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Scale the costs by a common factor that makes all of them integers, so that comparing sums is exact."""
    ratios = []
    for index, cost in enumerate(costs):
        exact = cost if isinstance(cost, int) else float(cost)
        if exact < 0 or (isinstance(exact, float) and not math.isfinite(exact)):
            raise ValueError(f"costs must be finite and not negative (cost of layer {index}: {exact})")
        ratios.append(exact.as_integer_ratio())
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _smallest_bound(prefix: list[int], partitions: int) -> int:
    """Bisect for the smallest bound under which ``partitions`` blocks hold all layers."""
    largest = max(after - before for before, after in pairwise(prefix))
    low, high = max(largest, -(-prefix[-1] // partitions)), prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(prefix, partitions, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(prefix: list[int], partitions: int, bound: int) -> bool:
    """Fill block after block up to the bound. Fewer blocks than asked for will do: they can be split."""
    end = 0
    for _ in range(partitions):
        end = bisect_right(prefix, prefix[end] + bound) - 1
        if end == len(prefix) - 1:
            return True
    return False


def _most_even(prefix: list[int], partitions: int, bound: int) -> list[int]:
    """Of all cuts under the bound, find the one with the least sum of squares by dynamic programming.

    ``best[end]`` is the least sum when the blocks so far end before layer ``end``. The first ``k`` blocks can
    end anywhere between ``k`` (one layer each) and what the bound and the blocks still to come allow.
    """
    layers = len(prefix) - 1
    earliest = [bisect_left(prefix, total - bound) for total in prefix]
    best, farthest, cuts = [0] * (layers + 1), 0, []
    for k in range(1, partitions + 1):
        starts = range(k - 1, farthest + 1)
        farthest = min(bisect_right(prefix, prefix[farthest] + bound) - 1, layers - partitions + k)
        best, cut = _append_block(prefix, earliest, best, range(k, farthest + 1), starts)
        cuts.append(cut)

    balance, end = [], layers
    for cut in reversed(cuts):
        balance.append(end - cut[end])
        end = cut[end]
    return balance[::-1]


def _append_block(
    prefix: list[int], earliest: list[int], best: list[int], ends: range, starts: range
) -> tuple[list[int], list[int]]:
    """Return, for each end, the least sum with one more block, and where this block starts.

    Squares are convex, so a later end never has an earlier best start. Hence the best start of the middle end
    splits the search for all others: n log n steps rather than n².
    """
    # Squared layer counts add up to less than this, so they only decide between equal costs.
    tie = len(prefix) ** 2
    total, cut = [0] * len(prefix), [0] * len(prefix)
    open_ranges = [(ends, starts)]
    while open_ranges:
        ends, starts = open_ranges.pop()
        if not ends:
            continue
        end = ends[len(ends) // 2]
        total[end], cut[end] = min(
            (best[start] + (prefix[end] - prefix[start]) ** 2 * tie + (end - start) ** 2, start)
            for start in range(max(earliest[end], starts[0]), min(end, starts[-1] + 1))
        )
        open_ranges += [
            (range(ends[0], end), range(starts[0], cut[end] + 1)),
            (range(end + 1, ends[-1] + 1), range(cut[end], starts[-1] + 1)),
        ]
    return total, cut
