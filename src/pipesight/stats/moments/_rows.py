"""The moments of a large flat tensor: float32 in rows of 1024 elements, float64 from there on.

A row is short enough for its float32 sums to be right to about 1e-7: 16 to 128 numbers to a lane of a register. The
rows are taken in chunks that stay in the cache while the passes over them run. The first pass waits for memory, so it
is the one that computes most. Squares are summed about a shift K, near the mean where the mean is large::

    Σ (x - mean)² = Σ (x - K)² - n (mean - K)²

That is right while the two terms do not cancel; where they do, the block is taken again with a better K. Chunks that
float32 cannot serve (NaN, infinities, magnitudes whose squares it cannot hold) are left to float64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesight.stats.moments._exact import constant, exact, smallest_nonzero
from pipesight.stats.moments._scratch import take
from pipesight.stats.moments.moments import Moments

__all__ = ["FLOAT32", "in_rows"]

ROW = 1024
CHUNK = 1 << 19  # elements: 2 MiB of float32. Smaller ones, in L2, lose more to calls than they gain
COPIED = 2  # such chunks at a time, where a copy is worked on in place
BLOCK = 1 << 24  # elements that share one shift
ON_DEVICE = 1 << 23  # elements of a chunk elsewhere than on the CPU
RUNS, RUN = 64, 16  # of neighbours that are sampled: elements on their own would be a cache miss each
LEAST, GREATEST = 2.0**-45, 2.0**55  # squares of such magnitudes, and sums of them, are float32s with all digits
CANCELLED = 4.0  # the greatest Σ (x - K)² / Σ (x - mean)² that is good for 1e-6
ATTEMPTS = 3
SIGN = 1 << 15  # the sign of a short float
SHORT = {torch.bfloat16: ("<I", "<f", 16), torch.float16: ("<H", "<e", 0)}  # how bits become a number

# The dtypes whose every value is a float32.
FLOAT32 = frozenset(
    getattr(torch, name)
    for name in (
        *("float32", "bfloat16", "float16", "bool", "uint8", "int8", "int16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)


def in_rows(x: Tensor, *, smallest: bool, magnitudes: bool = True, chunk: int | None = None) -> Moments:
    """The moments of a flat tensor of one of the dtypes in ``FLOAT32``."""
    size = x.numel()
    if chunk is None:
        chunk = ON_DEVICE
        if x.device.type == "cpu":
            chunk = CHUNK * min(torch.get_num_threads(), 4) * (1 if x.dtype == torch.float32 else COPIED)
    whole = size - size % ROW
    result = Moments.EMPTY
    if whole < size:
        result = exact(x[whole:], powers=False, smallest=smallest, magnitudes=magnitudes)
    shift = _sampled_shift(x) if whole > 2 * chunk else 0.0
    for start in range(0, whole, BLOCK):
        block = x if size <= BLOCK and whole == size else x[start : min(start + BLOCK, whole)]
        result = result.merge(_block(block, shift, min(chunk, block.numel()), smallest, magnitudes))
    return result


def _block(x: Tensor, shift: float, chunk: int, smallest: bool, magnitudes: bool) -> Moments:
    """The moments of whole rows, with one shift."""
    for _ in range(ATTEMPTS):
        sums = _sums(x, shift, chunk, smallest, magnitudes)
        if not sums.count:
            return sums.apart
        mean = sums.total / sums.count  # from the shift
        m2 = sums.squares - sums.total * mean
        if m2 * CANCELLED > sums.squares:
            moments = Moments(
                *(sums.count, 0.0, 0.0, sums.zeros, sums.low, sums.high),
                *(shift + mean, m2, sums.l1, sums.tiny, math.nan, math.nan),
            )
            return moments.merge(sums.apart) if sums.count < x.numel() else moments
        shift = _rounded(shift + mean, math.sqrt(max(m2, 0.0) / sums.count))
    return exact(x, powers=False, smallest=smallest, magnitudes=magnitudes)


def _sampled_shift(x: Tensor) -> float:
    """A shift from a few elements: 0, or near their mean where that is large beside their deviation."""
    step = (x.numel() - RUN) // RUNS | 1  # odd: meets no period of 2**n
    runs = x.as_strided(((x.numel() - RUN) // step + 1, RUN), (step, 1))
    sample = runs.to(torch.float32).cpu().double().numpy()  # numpy would warn of a signalling NaN
    if not math.isfinite(sample.sum()):
        sample = sample[np.isfinite(sample)]
    if not sample.size:
        return 0.0
    mean, deviation = float(sample.mean()), float(sample.std())
    if not deviation or not mean * mean > 2 * deviation * deviation:
        return 0.0
    return _rounded(mean, deviation)


def _rounded(mean: float, deviation: float) -> float:
    """A float32 near the mean, and a round number beside the deviation.

    Were the last bits of the shift finer than those of x, all x - K would be rounded the same way.
    """
    if deviation > 0:
        unit = 2.0 ** math.floor(math.log2(deviation))
        mean = round(mean / unit) * unit
    return torch.tensor(mean, dtype=torch.float32, device="cpu").item()


@dataclass(slots=True)
class Sums:
    """What has been summed of a block."""

    shift: float
    count: int = 0
    total: float = 0.0  # Σ x - count · shift
    squares: float = 0.0  # Σ (x - shift)²
    l1: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    zeros: float = 0.0
    tiny: float = math.inf
    apart: Moments = field(default=Moments.EMPTY)  # of the chunks that float32 cannot serve


def _sums(x: Tensor, shift: float, chunk: int, smallest: bool, magnitudes: bool) -> Sums:
    """Sum whole rows, squares about ``shift``."""
    # A chunk pushes the interpreter out of the cache, so that a call costs ten times what it does elsewhere: views are
    # made beforehand.
    device, size = x.device, x.numel()
    rows = size // ROW
    per_row = take("rows", 3 * rows, device).view(3, rows)
    work = take("buffer", chunk, device)
    copy = None if x.dtype == torch.float32 else take("copies", chunk, device)
    work_table = work.view(-1, ROW)
    alone = x.is_cpu and torch.get_num_threads() == 1
    square_sums = _square_sums_by_numpy if alone and hasattr(np, "vecdot") else _square_sums
    read: Callable[[Tensor, Any], tuple[Tensor, float, float]] = _read
    if x.dtype in SHORT:
        read = _read_short_by_numpy if alone else _read_short
    result = Sums(shift)
    if not smallest:
        result.zeros = result.tiny = math.nan
    parts = zip(x.split(chunk), *(of_rows.split(chunk // ROW) for of_rows in per_row), strict=True)
    for part, sums, squares, sizes in parts:
        count = part.numel()
        if count < chunk:  # the last one
            work, work_table = work.narrow(0, 0, count), work_table.narrow(0, 0, count // ROW)
            copy = None if copy is None else copy.narrow(0, 0, count)
        part, low, high = read(part, copy)
        if low == high or not LEAST < max(-low, high) < GREATEST:
            same = low == high and math.isfinite(low)  # a chunk that overflowed holds nothing but one infinity
            asked = {"powers": False, "smallest": smallest, "magnitudes": magnitudes}
            odd = constant(low, count) if same else exact(part, **asked)
            result.apart = result.apart.merge(odd)
            for of_rows in (sums, squares, sizes):
                of_rows.zero_()
            continue
        result.low, result.high, result.count = min(result.low, low), max(result.high, high), result.count + count
        table = source = part.view(-1, ROW)
        if shift:
            torch.sub(part, shift, out=work)
            source = work_table
        square_sums(source, squares)
        centre = shift
        if size > chunk and not low <= shift <= high:  # sorted, say: a sum about a mean of its own keeps more digits
            centre = _sampled_shift(part) or shift
        if centre != shift:
            torch.sub(part, centre, out=work)
            source = work_table
        torch.sum(source, 1, out=sums)
        result.total += (centre - shift) * count
        signs = low < 0 < high
        if not magnitudes:
            sizes.fill_(math.nan)
        elif not signs:
            torch.add(sums, ROW * centre, out=sizes).abs_()
        elif copy is None:
            torch.abs(part, out=work)
            torch.sum(work_table, 1, out=sizes)
        else:  # in place, which takes half the time
            part.abs_()
            torch.sum(table, 1, out=sizes)
        if smallest:
            absolute = signs and magnitudes and copy is not None
            zeros, tiny = smallest_nonzero(part, 0.0 if absolute else low, high, work)
            result.zeros, result.tiny = result.zeros + zeros, min(result.tiny, tiny)
    total, result.squares, result.l1 = per_row.cpu().double().sum(1).tolist()  # not every device has float64
    result.total += total
    return result


def _read(part: Tensor, copy: Tensor | None) -> tuple[Tensor, float, float]:
    """Return a chunk as float32, and its least and its greatest element: two NaNs if it has one."""
    part = part if copy is None else copy.copy_(part)
    least, greatest = torch.aminmax(part)
    return part, least.item(), greatest.item()


def _read_short(part: Tensor, copy: Tensor) -> tuple[Tensor, float, float]:
    """The same of short floats, whose ends take as long as those of float32: they are the first pass."""
    least, greatest = torch.aminmax(part)
    return copy.copy_(part), least.item(), greatest.item()


def _read_short_by_numpy(part: Tensor, copy: Tensor) -> tuple[Tensor, float, float]:
    """The same, on one thread in two thirds of the time: bits after a sign are in the order of the magnitudes."""
    table, dtype = copy.copy_(part), part.dtype
    signed = part.view(torch.int16).numpy()
    unsigned = signed.view(np.uint16)
    bits = int(np.maximum.reduce(signed))  # of the greatest, unless all are negative
    high = bits if bits >= 0 else int(np.minimum.reduce(unsigned))
    bits = int(np.maximum.reduce(unsigned))  # of the least, unless none is negative
    low = bits if bits >= SIGN else int(np.minimum.reduce(signed))
    least, greatest = _number(low, dtype), _number(high, dtype)
    return (table, least, greatest) if least == least and greatest == greatest else (table, math.nan, math.nan)


def _number(bits: int, dtype: torch.dtype) -> float:
    """Return the short float that has these bits."""
    source, target, shift = SHORT[dtype]
    number: float
    (number,) = struct.unpack(target, struct.pack(source, bits << shift))
    return number


def _square_sums(table: Tensor, out: Tensor) -> None:
    """Sum the squares of each row."""
    # It adds to one register, so that more numbers meet in a lane than elsewhere: in quarters of rows, as many do.
    torch.sum(torch.linalg.vector_norm(table.view(-1, 4, ROW // 4), 2, 2).square_(), 1, out=out)


def _square_sums_by_numpy(table: Tensor, out: Tensor) -> None:
    """The same, on one thread in half the time."""
    array = table.numpy()
    np.vecdot(array, array, out=out.numpy())
