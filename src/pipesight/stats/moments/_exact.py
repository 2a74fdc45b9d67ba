"""The moments of a flat tensor, in float64 throughout."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesight.stats.moments._scratch import take
from pipesight.stats.moments.moments import Moments

__all__ = ["constant", "exact", "smallest_nonzero"]

CHUNK = 1 << 15  # elements: three float64 buffers of them fit a usual L2 cache
LEAST, GREATEST = 2.0**-480, 2.0**480  # squares of such magnitudes, and sums of them, are float64s with all digits
CPU = torch.device("cpu")
NAN = math.nan


def exact(x: Tensor, *, powers: bool, smallest: bool, magnitudes: bool = True) -> Moments:
    """The moments of a flat tensor of any real dtype; on another device than the CPU, of a copy of it there."""
    if x.device.type != "cpu":
        x = x.cpu()
    if x.numel() <= CHUNK:
        return _chunk(x, powers, smallest, magnitudes)
    result = Moments.EMPTY
    for part in x.split(CHUNK):
        result = result.merge(_chunk(part, powers, smallest, magnitudes))
    return result


def _chunk(source: Tensor, powers: bool, smallest: bool, magnitudes: bool) -> Moments:
    count = source.numel()
    if not count:
        return Moments.EMPTY
    x = take("exact", count, CPU, torch.float64).copy_(source)
    # Calls of numpy cost half of torch's; but np.dot would start threads of its own, which take the cores from others.
    numbers: NDArray[np.float64] = x.numpy()
    low, high = float(np.minimum.reduce(numbers)), float(np.maximum.reduce(numbers))
    if not (low > -math.inf and high < math.inf):
        nans, infs = int(x.isnan().sum()), int(x.isinf().sum())
        return _chunk(x[x.isfinite()], powers, smallest, magnitudes).merge(Moments(nans=nans, infs=infs))
    if low == high:
        return constant(low, count)
    work = take("exact work", count, CPU, torch.float64)
    zeros = tiny = m3 = m4 = NAN
    if smallest:
        zeros, tiny = smallest_nonzero(x, low, high, work)
    if not LEAST < max(-low, high) < GREATEST:
        return _scaled(x, low, high, zeros, tiny)
    total = float(np.add.reduce(numbers))
    l1 = abs(total)
    if low < 0 < high:
        l1 = float(np.add.reduce(np.abs(numbers, out=work.numpy()))) if magnitudes else NAN
    mean = total / count
    np.subtract(numbers, mean, out=numbers)
    # What rounding left of the mean.
    off = float(np.add.reduce(numbers)) / count if source.dtype == torch.float64 else 0.0
    if not powers:
        m2 = torch.dot(x, x).item() - count * off * off
    else:
        squares = np.multiply(numbers, numbers, out=work.numpy())
        s2 = float(np.add.reduce(squares))
        s3, s4 = torch.dot(work, x).item(), torch.dot(work, work).item()
        m2 = s2 - count * off * off
        m3 = s3 - off * (3 * s2 - 2 * count * off * off)
        m4 = s4 - off * (4 * s3 - off * (6 * s2 - 3 * count * off * off))
    return Moments(count, 0.0, 0.0, zeros, low, high, mean + off, m2, l1, tiny, m3, m4)


def _scaled(x: Tensor, low: float, high: float, zeros: float, tiny: float) -> Moments:
    """The same for magnitudes whose squares no float64 holds: m2 and what follows from it stay unknown."""
    scale = 2.0 ** max(-1000, min(1000, math.frexp(max(-low, high))[1]))
    x = x / scale
    mean, l1 = x.mean().item() * scale, x.abs().sum().item() * scale
    return Moments(x.numel(), 0.0, 0.0, zeros, low, high, mean, NAN, l1, tiny, NAN, NAN)


def constant(value: float, count: int) -> Moments:
    """The moments of ``count`` equal elements."""
    size = abs(value)
    zeros, tiny = (0.0, size) if value else (count, math.inf)
    return Moments(count, 0.0, 0.0, zeros, value, value, value, 0.0, size * count, tiny)


def smallest_nonzero(x: Tensor, low: float, high: float, out: Tensor) -> tuple[float, float]:
    """The number of zeros and the least non-zero magnitude of finite elements between ``low`` and ``high``.

    Args:
        x: the elements.
        low: the least of them.
        high: the greatest of them.
        out: a buffer of the size and dtype of ``x`` to work in; not ``x``.
    """
    if low > 0 or high < 0:
        return 0.0, min(abs(low), abs(high))
    magnitudes = x if low == 0 else torch.abs(x, out=out)
    tiny = torch.amin(magnitudes).item()
    if tiny > 0:
        return 0.0, tiny
    torch.ops.aten.threshold.out(magnitudes, 0, math.inf, out=out)  # zeros become inf
    tiny = torch.amin(out).item()
    torch.ne(x, 0, out=out)  # 0.0 and 1.0: many times faster than booleans
    zeros = x.numel() - sum(int(part.sum().item()) for part in out.split(1 << 24))  # float32 counts that far
    return zeros, tiny
