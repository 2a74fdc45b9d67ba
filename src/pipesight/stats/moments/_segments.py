"""The moments of many small tensors that lie one after the other: a few passes over all of them, not over each.

Each begins with a row of 1024 elements, and zeros fill its last one. Rows are short enough for float32 sums to be right
to about 1e-7; from there on, and where terms may cancel, it is float64::

    rows      | tensor 0 | tensor 0 | tensor 0, 0 0 0 | tensor 1 | tensor 1, 0 0 | ...

Tensors that float32 cannot serve, and those whose mean is large beside their deviation, are None: `exact` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipesight.stats.moments._rows import CANCELLED, GREATEST, LEAST, ROW
from pipesight.stats.moments._scratch import take

__all__ = ["ROW", "in_segments"]

NAN = math.nan
PASS = 1 << 18  # elements that stay in the cache while the passes over them run
ONES = np.ones(ROW, np.float32)
CPU = torch.device("cpu")


def _row_dot(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """What ``np.vecdot`` does, for versions of NumPy without it."""
    dots: NDArray[np.float32] = np.einsum("...i,...i", a, b)
    return dots


row_dot: Callable[[NDArray[np.float32], NDArray[np.float32]], Any] = getattr(np, "vecdot", _row_dot)


def in_segments(
    numbers: NDArray[np.float32], sizes: Sequence[int], *, magnitudes: bool = True
) -> list[list[float] | None]:
    """Return the rows of moments of tensors of these sizes, without zeros, the least magnitude and higher powers."""
    found: list[list[float] | None] = []
    start = first = 0
    while first < len(sizes):
        last, end = first, start
        while last < len(sizes) and (last == first or end + sizes[last] - start <= PASS):
            end, last = end + -(-sizes[last] // ROW) * ROW, last + 1
        found += _measure(numbers[start:end], np.array(sizes[first:last]), magnitudes)
        start, first = end, last
    return found


def _measure(x: NDArray[np.float32], sizes: NDArray[np.int64], magnitudes: bool) -> list[list[float] | None]:
    table, rows = x.reshape(-1, ROW), -(-sizes // ROW)
    first = np.cumsum(rows) - rows  # of each tensor
    edges = np.stack([first * ROW, first * ROW + sizes], 1).reshape(-1)  # where it begins, and where its zeros do
    edges = edges[: -1 if edges[-1] == len(x) else None]
    columns = np.full((12, len(sizes)), NAN)
    with np.errstate(invalid="ignore", over="ignore"):  # such tensors are left to others
        low = columns[4] = np.minimum.reduceat(x, edges)[::2]
        high = columns[5] = np.maximum.reduceat(x, edges)[::2]
        total, squares = _summed(row_dot(table, ONES), first), _summed(row_dot(table, table), first)
        if magnitudes:
            work = np.abs(x, out=take("segments", len(x), CPU).numpy())
            columns[8] = _summed(row_dot(work.reshape(-1, ROW), ONES), first)
        mean = columns[6] = total / sizes
        m2 = columns[7] = squares - total * mean
        largest = np.maximum(-low, high)
        good = (low < high) & (largest > LEAST) & (largest < GREATEST) & (m2 * CANCELLED > squares)
    columns[0], columns[1:3] = sizes, 0.0
    return [row if is_good else None for row, is_good in zip(columns.T.tolist(), good.tolist(), strict=True)]


def _summed(of_rows: NDArray[np.float32], first: NDArray[np.int64]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.add.reduceat(of_rows.astype(np.float64), first)
    return sums
