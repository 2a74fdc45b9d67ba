"""The moments of a large flat tensor: float32 in rows of 256 elements, float64 from there on.

A row is short enough for its float32 sums to be right to about 1e-7. The rows are taken in chunks that stay in the
cache while the passes over them run. Squares are summed about a shift K, near the mean where the mean is large::

    Σ (x - mean)² = Σ (x - K)² - n (mean - K)²

That is right while the two terms do not cancel; where they do, the block is taken again with a better K. Chunks that
float32 cannot serve (NaN, infinities, magnitudes whose squares it cannot hold) are left to float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipesight.stats.moments._exact import constant, exact, smallest_nonzero
from pipesight.stats.moments._scratch import take
from pipesight.stats.moments.moments import Moments

__all__ = ["FLOAT32", "in_rows"]

ROW = 256
CHUNK = 1 << 19  # elements: 2 MiB of float32. Smaller ones, in L2, lose more to calls than they gain
BLOCK = 1 << 23  # elements that share one shift
SAMPLES = 1024
LEAST, GREATEST = 2.0**-45, 2.0**55  # squares of such magnitudes, and sums of them, are float32s with all digits
CANCELLED = 4.0  # the greatest Σ (x - K)² / Σ (x - mean)² that is good for 1e-6
ATTEMPTS = 3

# The dtypes whose every value is a float32.
FLOAT32 = frozenset(
    getattr(torch, name)
    for name in (
        *("float32", "bfloat16", "float16", "bool", "uint8", "int8", "int16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)


def in_rows(x: Tensor, *, smallest: bool, chunk: int | None = None) -> Moments:
    """The moments of a flat tensor of one of the dtypes in ``FLOAT32``."""
    size = x.numel()
    if chunk is None:
        chunk = CHUNK * min(torch.get_num_threads(), 4) if x.device.type == "cpu" else BLOCK
    whole = size - size % ROW
    result = Moments.EMPTY if whole == size else exact(x[whole:], powers=False, smallest=smallest)
    for start in range(0, whole, BLOCK):
        block = x if size <= BLOCK and whole == size else x[start : min(start + BLOCK, whole)]
        result = result.merge(_block(block, min(chunk, block.numel()), smallest))
    return result


def _block(x: Tensor, chunk: int, smallest: bool) -> Moments:
    """The moments of whole rows, with one shift."""
    shift = _sampled_shift(x) if x.numel() > 2 * chunk else 0.0
    for _ in range(ATTEMPTS):
        sums = _sums(x, shift, chunk, smallest)
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
        shift = _float32(shift + mean)
    return exact(x, powers=False, smallest=smallest)


def _sampled_shift(x: Tensor) -> float:
    """A shift from a few elements: 0, or near their mean where that is large beside their deviation."""
    sample = x[:: x.numel() // SAMPLES | 1].to(torch.float32).cpu().to(torch.float64)  # odd: meets no period of 2**n
    if not sample.sum().isfinite():
        sample = sample[sample.isfinite()]
    if not sample.numel():
        return 0.0
    mean, deviation = sample.mean().item(), sample.std(correction=0).item()
    if not deviation or not mean * mean > 2 * deviation * deviation:
        return 0.0
    # A round number: were the last bits of the shift finer than those of x, all x - K would be rounded the same way.
    step = 2.0 ** math.floor(math.log2(deviation))
    return _float32(round(mean / step) * step)


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


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


def _sums(x: Tensor, shift: float, chunk: int, smallest: bool) -> Sums:
    """Sum whole rows, squares about ``shift``."""
    device, size = x.device, x.numel()
    rows = size // ROW
    per_row = take("rows", 3 * rows, device).view(3, rows)
    buffer = take("buffer", chunk, device)
    copies = None if x.dtype == torch.float32 else take("copies", chunk, device)
    result = Sums(shift)
    if not smallest:
        result.zeros = result.tiny = math.nan
    row = 0
    for start in range(0, size, chunk):
        count = min(chunk, size - start)
        part = x if count == size else x.narrow(0, start, count)
        work = buffer if count == chunk else buffer.narrow(0, 0, count)
        if copies is not None:
            part = (copies if count == chunk else copies.narrow(0, 0, count)).copy_(part)
        least, greatest = torch.aminmax(part)
        low, high = least.item(), greatest.item()
        if low == high or not LEAST < max(-low, high) < GREATEST:
            same = low == high and math.isfinite(low)  # a chunk that overflowed holds nothing but one infinity
            odd = constant(low, count) if same else exact(part, powers=False, smallest=smallest)
            result.apart = result.apart.merge(odd)
            continue
        result.low, result.high, result.count = min(result.low, low), max(result.high, high), result.count + count
        sums, norms, sizes = torch.unbind(per_row.narrow(1, row, count // ROW))
        row += count // ROW
        table, work_table = part.view(-1, ROW), work.view(-1, ROW)
        if low < 0 < high:
            torch.abs(part, out=work)
            torch.sum(work_table, 1, out=sizes)
        if smallest:
            zeros, tiny = smallest_nonzero(part, low, high, work)
            result.zeros, result.tiny = result.zeros + zeros, min(result.tiny, tiny)
        if shift:
            torch.sub(part, shift, out=work)
            table = work_table
        torch.linalg.vector_norm(table, 2, 1, out=norms)
        centre = shift
        if size > chunk and not low <= shift <= high:  # sorted, say: a sum about a mean of its own keeps more digits
            centre = _sampled_shift(part) or shift
        if centre != shift:
            torch.sub(part, centre, out=work)
            table = work_table
        torch.sum(table, 1, out=sums)
        result.total += (centre - shift) * count
        if not low < 0 < high:
            torch.add(sums, ROW * centre, out=sizes).abs_()
    if row:
        sums, norms, sizes = torch.unbind(per_row.narrow(1, 0, row).cpu().double())  # not every device has float64
        result.total += sums.sum().item()
        result.squares, result.l1 = torch.dot(norms, norms).item(), sizes.sum().item()
    return result
