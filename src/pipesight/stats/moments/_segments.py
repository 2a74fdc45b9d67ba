"""The moments of many small tensors that lie one after the other: a few passes over all of them, not over each.

Squares and magnitudes are summed in segments of at most 1024 elements, short enough for float32 to be right to about
1e-7; from there on, and where terms may cancel, it is float64::

    numbers   | tensor 0                | tensor 1      | ...
    segments  | 1024 | 1024 | the rest  | 1024 | rest   |

Tensors that float32 cannot serve, and those whose mean is large beside their deviation, are None: `exact` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesight.stats.moments._rows import CANCELLED, GREATEST, LEAST, ROW
from pipesight.stats.moments.moments import Moments

__all__ = ["in_segments"]

NAN = math.nan
PASS = 1 << 17  # elements that stay in the cache while the passes over them run


def in_segments(numbers: NDArray[np.float32], sizes: Sequence[int], *, magnitudes: bool = True) -> list[Moments | None]:
    """Return the moments of tensors of these sizes, without zeros, the least magnitude and the higher powers."""
    found: list[Moments | None] = []
    start = first = 0
    while first < len(sizes):
        last, end = first, start
        while last < len(sizes) and (last == first or end + sizes[last] - start <= PASS):
            end, last = end + sizes[last], last + 1
        found += _measure(numbers[start:end], np.array(sizes[first:last]), magnitudes)
        start, first = end, last
    return found


def _measure(x: NDArray[np.float32], sizes: NDArray[np.int64], magnitudes: bool) -> list[Moments | None]:
    segments = -(-sizes // ROW)
    of_tensor = np.cumsum(segments) - segments  # its first segment
    starts = np.cumsum(sizes) - sizes
    offsets = np.repeat(starts - of_tensor * ROW, segments) + np.arange(segments.sum()) * ROW
    with np.errstate(invalid="ignore", over="ignore"):  # such tensors are left to others
        low = np.minimum.reduceat(x, starts).astype(np.float64)
        high = np.maximum.reduceat(x, starts).astype(np.float64)
        total = np.add.reduceat(x, starts, dtype=np.float64)
        work = np.multiply(x, x)
        squares = _summed(work, offsets, of_tensor)
        l1 = np.full(len(sizes), NAN)
        if magnitudes:
            l1 = _summed(np.abs(x, out=work), offsets, of_tensor)
        mean = total / sizes
        m2 = squares - total * mean
        largest = np.maximum(-low, high)
        good = (low < high) & (largest > LEAST) & (largest < GREATEST) & (m2 * CANCELLED > squares)
    columns = zip(*(values.tolist() for values in (good, sizes, low, high, mean, m2, l1)), strict=True)
    return [
        Moments(n, 0.0, 0.0, NAN, least, greatest, centre, about, size, NAN, NAN, NAN) if is_good else None
        for is_good, n, least, greatest, centre, about, size in columns
    ]


def _summed(x: NDArray[np.float32], offsets: NDArray[np.int64], of_tensor: NDArray[np.int64]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.add.reduceat(np.add.reduceat(x, offsets).astype(np.float64), of_tensor)
    return sums
