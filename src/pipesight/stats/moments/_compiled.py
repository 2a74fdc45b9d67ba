"""The moments of a large flat tensor by a kernel that numba compiles: one pass over it, in float64 throughout.

Arithmetic on a number that has come from memory costs next to nothing, so the kernel takes less than twice as long as
`x.sum()`. It sums squares about the first element K of each block::

    Σ (x - mean)² = Σ (x - K)² - n (mean - K)²

K is one of the n elements, so the first sum is at most n + 1 times the result: of the 53 bits, 15 may cancel. Ends are
found by bits, which are in the order of the numbers once those of negative ones are flipped, NaN and infinities being
outermost. A block with such elements is taken again without them.

Importing numba takes half a second, and compiling as long again, once for each dtype: the result is kept on the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesight.stats.moments._scratch import take
from pipesight.stats.moments.moments import FIELDS, Moments, merge_table

__all__ = ["in_blocks"]

BLOCK = 1 << 14  # elements: 64 KiB of float32, which stay in the cache if they are read again
CHUNK = 1 << 18  # elements of other dtypes that are copied to float32 at a time
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # the dtypes that the kernel reads, as bits
LEAST, MAGNITUDE, INFINITY, SIGN = np.int32(-1 << 31), np.int32(0x7FFFFFFF), np.int32(0x7F800000), np.int32(31)
SUBNORMAL, NORMAL, ZERO = np.int32(1), np.int32(0x00800000), np.float32(0)

Function = TypeVar("Function", bound=Callable[..., Any])


def in_blocks(x: Tensor, *, powers: bool, smallest: bool, magnitudes: bool) -> Moments:
    """The moments of a flat tensor on the CPU, of one of the dtypes in ``FLOAT32``."""
    size = x.numel()
    # The bits of the least magnitude that is not 0: another one after `torch.set_flush_denormal(True)`.
    asked = (powers, smallest, magnitudes, SUBNORMAL if SUBNORMAL.view(np.float32) + ZERO else NORMAL)
    table = np.empty((-(-size // BLOCK), len(FIELDS)))
    table[:] = Moments.EMPTY.row()
    if x.dtype in BITS:
        _fill(table, x.view(BITS[x.dtype]).numpy(), BLOCK, *asked)
    else:
        chunk = max(CHUNK // BLOCK, 1) * BLOCK
        for start, part in zip(range(0, size, chunk), x.split(chunk), strict=True):
            copy = take("copies", part.numel(), part.device).copy_(part)
            _fill(table[start // BLOCK :], copy.numpy().view(np.int32), BLOCK, *asked)
    return merge_table(table)


def _compiled(function: Function) -> Function:
    # Sums may be taken in any order, so that they fill vectors. NaN and infinities keep their meaning.
    order = {"reassoc", "contract", "nsz"}
    return cast(Function, numba.njit(nogil=True, error_model="numpy", fastmath=order)(function))


@_compiled
def _word(bits: NDArray[Any], i: int) -> np.int32:
    """Return the bits of element i as a float32; those of a bfloat16 are their upper half."""
    return np.int32(np.int32(bits[i]) << np.int32(32 - 8 * bits.itemsize))


@_compiled
def _key(word: np.int32) -> np.int32:
    """Return a number that is ordered as the floats are; the same of it gives the bits back."""
    return np.int32(word ^ ((word >> SIGN) & MAGNITUDE))


@_compiled
def _number(word: np.int32) -> float:
    """Return the number that has these bits."""
    return np.float64(np.int32(word).view(np.float32))


@_compiled
def _fill(
    table: NDArray[np.float64],
    bits: NDArray[Any],
    block: int,
    powers: bool,
    smallest: bool,
    magnitudes: bool,
    least: np.int32,
) -> None:
    """Write the moments of each block to a row of the table, in the order of ``FIELDS``."""
    finite = np.empty(block, bits.dtype)
    for k in range(-(-bits.size // block)):
        part, row = bits[k * block : (k + 1) * block], table[k]
        low, high, total, squares, size = _sums(part)
        if high >= INFINITY or low <= ~INFINITY:
            kept = 0
            for i in range(part.size):
                magnitude = _word(part, i) & MAGNITUDE
                row[1] += magnitude > INFINITY
                row[2] += magnitude == INFINITY
                if magnitude < INFINITY:
                    finite[kept] = part[i]
                    kept += 1
            if not kept:
                continue
            part = finite[:kept]
            low, high, total, squares, size = _sums(part)
        count = part.size
        mean = _number(_word(part, 0)) + total / count
        row[0], row[4], row[5], row[6] = count, _number(_key(low)), _number(_key(high)), mean
        row[7], row[8] = squares - total * (total / count), size if magnitudes else np.nan
        row[3], row[9] = _nearest_zero(part, least) if smallest else (np.nan, np.nan)
        row[10], row[11] = _powers(part, mean) if powers else (np.nan, np.nan)


@_compiled
def _sums(bits: NDArray[Any]) -> tuple[np.int32, np.int32, float, float, float]:
    """Return the keys of the ends, Σ (x - K), Σ (x - K)² and Σ |x|."""
    low, high, total, squares, size = MAGNITUDE, LEAST, 0.0, 0.0, 0.0
    first = _number(_word(bits, 0))
    for i in range(bits.size):
        word = _word(bits, i)
        key, x = _key(word), _number(word)
        low, high = min(low, key), max(high, key)
        size += abs(x)
        off = x - first
        total += off
        squares += off * off
    return low, high, total, squares, size


@_compiled
def _nearest_zero(bits: NDArray[Any], least: np.int32) -> tuple[np.int32, float]:
    """Return the number of zeros, of which the bits are below ``least``, and the least magnitude of all others."""
    zeros, found = np.int32(0), INFINITY
    for i in range(bits.size):
        magnitude = np.int32(_word(bits, i) & MAGNITUDE)
        is_zero = magnitude < least
        zeros = np.int32(zeros + np.int32(is_zero))
        found = min(found, INFINITY if is_zero else magnitude)
    return zeros, _number(found)


@_compiled
def _powers(bits: NDArray[Any], mean: float) -> tuple[float, float]:
    """Return Σ (x - mean)³ and Σ (x - mean)⁴."""
    m3 = m4 = 0.0
    for i in range(bits.size):
        off = _number(_word(bits, i)) - mean
        square = off * off
        m3 += square * off
        m4 += square * square
    return m3, m4


with contextlib.suppress(RuntimeError):  # there is no folder to keep it in
    cast(Any, _fill).enable_caching()
