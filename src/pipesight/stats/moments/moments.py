"""Moments: what one pass over a tensor leaves behind, and how two of them become one.

Every statistic of `statistic_formulas` follows from moments. Moments of parts merge into the moments of the whole (Chan
et al. 1979, Pébay 2008), whatever the sizes of the parts, so micro-batches, accumulation steps and ranks need no tensor
to be kept or sent: one row of float64 each.

Example::

    whole = measure(first_half).merge(measure(second_half))
    whole.mean, whole.min, whole.count
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["FIELDS", "LaterMoments", "Moments", "merge_each", "merge_rows", "merge_table"]

FIELDS = ("count", "nans", "infs", "zeros", "min", "max", "mean", "m2", "l1", "smallest", "m3", "m4")
EXACT = ("count", "nans", "infs", "zeros", "min", "max", "smallest")  # whatever the order of the elements
TINY = 1e-280  # a sum of squares below it may have lost digits, or all of them


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of the finite elements of a tensor, or of several merged ones. From `measure`.

    A field that was not requested is NaN, and stays NaN when merged. ``m2`` is also NaN where it would overflow or
    underflow: for float64 elements beyond about 1e±144.

    Attributes:
        count: finite elements.
        nans: NaNs; no other field knows of them.
        infs: infinities of both signs; no other field knows of them.
        zeros: elements equal to 0.
        min: the least element, ``inf`` when there is none.
        max: the greatest element, ``-inf`` when there is none.
        mean: sum of ``x`` over count, 0 when there is none.
        m2: sum of ``(x - mean)**2``.
        l1: sum of ``|x|``.
        smallest: the least non-zero ``|x|``, ``inf`` when there is none.
        m3: sum of ``(x - mean)**3``.
        m4: sum of ``(x - mean)**4``.
    """

    count: float = 0.0
    nans: float = 0.0
    infs: float = 0.0
    zeros: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    mean: float = 0.0
    m2: float = 0.0
    l1: float = 0.0
    smallest: float = math.inf
    m3: float = 0.0
    m4: float = 0.0

    EMPTY: ClassVar[Moments]
    """The moments of no elements."""

    @property
    def amax(self) -> float:
        """The greatest ``|x|``, NaN when there is no finite element."""
        return max(-self.min, self.max) if self.count else math.nan

    @property
    def is_bad(self) -> bool:
        """Whether there are NaNs or infinities."""
        return bool(self.nans or self.infs)

    def merge(self, other: Moments) -> Moments:
        """The moments of the elements of both."""
        a, b = self, other
        if not b.count or not a.count:  # the mean of nothing must not pull the other mean
            full, empty = (a, b) if a.count else (b, a)
            return Moments(
                full.count,
                a.nans + b.nans,
                a.infs + b.infs,
                a.zeros + b.zeros,
                full.min,
                full.max,
                full.mean,
                full.m2 + empty.m2,  # 0 + : keeps the NaN of a field that was not asked for
                full.l1 + empty.l1,
                _least(a.smallest, b.smallest),
                full.m3 + empty.m3,
                full.m4 + empty.m4,
            )
        n = a.count + b.count
        p, q = a.count / n, b.count / n
        d = b.mean - a.mean
        m2 = a.m2 + b.m2 + d * d * p * b.count
        return Moments(
            n,
            a.nans + b.nans,
            a.infs + b.infs,
            a.zeros + b.zeros,
            _least(a.min, b.min),
            -_least(-a.max, -b.max),
            a.mean + d * q if abs(d) < math.inf else a.mean * p + b.mean * q,
            m2 if not d or TINY < m2 < math.inf else math.nan,
            a.l1 + b.l1,
            _least(a.smallest, b.smallest),
            a.m3 + b.m3 + d * (d * d * p * q * (a.count - b.count) + 3 * (p * b.m2 - q * a.m2)),
            a.m4
            + b.m4
            + d * (d * (d * d * p * b.count * (p * p - p * q + q * q) + 6 * (p * p * b.m2 + q * q * a.m2)))
            + d * 4 * (p * b.m3 - q * a.m3),
        )

    def repeated(self, times: int) -> Moments:
        """The moments of the same elements, each of them ``times`` times (an expanded tensor).

        Example::

            measure(x.expand(8, -1)) == measure(x).repeated(8)
        """
        if times == 1 or not times:
            return self if times else Moments.EMPTY
        return Moments(
            self.count * times,
            self.nans * times,
            self.infs * times,
            self.zeros * times,
            self.min,
            self.max,
            self.mean,
            self.m2 * times,
            self.l1 * times,
            self.smallest,
            self.m3 * times,
            self.m4 * times,
        )

    def is_like(self, other: Moments) -> bool:
        """Whether these are the moments of the same elements, but for how sums were rounded."""
        if any(getattr(self, name) != getattr(other, name) for name in EXACT):
            return False
        scale = 1e-9 * self.l1
        return (
            abs(self.l1 - other.l1) <= scale
            and abs(self.mean - other.mean) * self.count <= scale
            and abs(self.m2 - other.m2) * self.count <= scale * self.l1 + 1e-9 * self.m2 * self.count
        )

    def row(self) -> list[float]:
        """The fields as floats, in the order of :data:`FIELDS`."""
        m = self
        first = [m.count, m.nans, m.infs, m.zeros, m.min, m.max]
        return [float(value) for value in (*first, m.mean, m.m2, m.l1, m.smallest, m.m3, m.m4)]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Moments:
        """The moments that :meth:`row` was called on."""
        if len(row) != len(FIELDS):
            raise ValueError(f"a row of moments must have {len(FIELDS)} numbers (got {len(row)})")
        return cls(*map(float, row))


Moments.EMPTY = Moments()


class LaterMoments:  # not an ABC: isinstance() takes ten times as long with one
    """Moments that are not at hand yet: on a device, or not worked out. All but ``ready`` wait for them."""

    __slots__ = ()

    @property
    def ready(self) -> bool:
        """Whether the rest does not wait for a device."""
        raise NotImplementedError

    @property
    def is_bad(self) -> bool:
        """Whether there are NaNs or infinities."""
        raise NotImplementedError

    def row(self) -> list[float]:
        """Return what :meth:`Moments.row` does."""
        raise NotImplementedError

    def moments(self) -> Moments:
        """Return the moments."""
        return Moments.from_row(self.row())


def _least(a: float, b: float) -> float:
    """min(a, b), or NaN where either is NaN."""
    return a if a < b or a != a else b


def merge_each(tensors: Sequence[Sequence[Sequence[float]]]) -> NDArray[np.float64]:
    """Merge the rows of each tensor, of its calls or ranks, in their order: a row a tensor, of all tensors at once.

    Example::

        merge_each([[first_half.row(), second_half.row()], [whole.row()]])
    """
    if not tensors:
        return np.empty((0, len(FIELDS)))
    most, empty = max(1, *map(len, tensors)), Moments.EMPTY.row()
    padded = [[*rows, *[empty] * (most - len(rows))] for rows in tensors]
    table = np.array(padded, dtype=np.float64).reshape(len(tensors), most, len(FIELDS))
    return _merged(table.transpose(2, 1, 0))


def merge_table(table: NDArray[np.float64]) -> Moments:
    """Merge the rows of a table, of parts of one tensor.

    Example::

        merge_table(np.array([first_half.row(), second_half.row()]))
    """
    return Moments(*_merged(table.T[:, :, None])[0].tolist())


def merge_rows(rows: Tensor) -> Tensor:
    """Merge ``[ranks, n, K]`` rows of moments to ``[n, K]``: as :meth:`Moments.merge`, but all ranks at once.

    Example::

        rows = torch.tensor([[m.row() for m in rank] for rank in ranks], dtype=torch.float64)
        merged = [Moments.from_row(row) for row in merge_rows(rows).tolist()]
    """
    import torch  # here, for those who only read a configuration

    if rows.dim() != 3 or rows.size(2) != len(FIELDS) or rows.dtype != torch.float64:
        raise ValueError(
            f"rows of moments must be float64 [ranks, n, {len(FIELDS)}] (got {rows.dtype} {list(rows.shape)})"
        )
    if not rows.size(0):
        return torch.tensor([Moments.EMPTY.row()], dtype=torch.float64, device="cpu").repeat(rows.size(1), 1)
    return torch.from_numpy(_merged(rows.numpy().transpose(2, 0, 1)))  # numpy's calls take half as long


def _merged(fields: NDArray[np.float64]) -> NDArray[np.float64]:
    counts, means, m2, m3 = fields[0], fields[6], fields[7], fields[10]
    with np.errstate(all="ignore"):
        merged: NDArray[np.float64] = np.add.reduce(fields, 1)  # of ends, too, whose sums nobody needs
        full = counts > 0
        first = means[full.argmax(0), np.arange(len(means[0]))]  # equal means stay what they are
        shares = counts / np.where(merged[0] > 0, merged[0], 1.0)
        mean = first + np.add.reduce(shares * (means - first), 0)
        mean = np.where(np.isfinite(mean), mean, np.add.reduce(shares * means, 0))
        d = np.where(full, means - mean, 0.0)
        dd = d * d
        spread = merged[7] + np.add.reduce(counts * dd, 0)
        apart = (d != 0).any(0)
        merged[7] = np.where(~apart | ((spread > TINY) & (spread < math.inf)), spread, math.nan)
        merged[10] += np.add.reduce(d * (3 * m2 + counts * dd), 0)
        merged[11] += np.add.reduce(d * (4 * m3 + d * (6 * m2 + counts * dd)), 0)
    merged[4], merged[5], merged[6] = fields[4].min(0), fields[5].max(0), mean
    merged[9] = fields[9].min(0)
    return merged.T
