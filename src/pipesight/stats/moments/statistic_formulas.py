"""The statistics, each a formula over moments.

x runs over the n finite elements of a tensor (of all its micro-batches and ranks, when they are merged); NaNs and
infinities are counted apart. With no finite element every statistic but the counts is NaN.

Example::

    STATISTICS["l2_norm"].formula(measure(torch.tensor([3.0, 4.0])))  # 5.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipesight.stats.moments.moments import Moments

__all__ = ["STATISTICS", "Statistic", "needs"]

NAN = math.nan


Column: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """The moments of many tensors, field by field."""

    count: Column
    nans: Column
    infs: Column
    zeros: Column
    min: Column
    max: Column
    mean: Column
    m2: Column
    l1: Column
    smallest: Column
    m3: Column
    m4: Column


@dataclass(frozen=True, slots=True)
class Statistic:
    """A named value that follows from moments.

    Attributes:
        name: as a configuration spells it.
        of_columns: from the moments of tensors that have finite elements to their values.
        fields: the fields of the moments that it reads.
        doc: the formula as text, for the documentation.
    """

    name: str
    of_columns: Callable[[Columns], Column]
    fields: frozenset[str]
    doc: str

    def formula(self, moments: Moments) -> float:
        """Return the value that follows from the moments of one tensor."""
        return float(self.formulas(np.array([moments.row()]))[0])

    def formulas(self, rows: NDArray[np.float64]) -> Column:
        """Return the values that follow from rows of moments, a row for each tensor."""
        columns = Columns(*rows.T)
        with np.errstate(all="ignore"):
            values = self.of_columns(columns)
        if not self.fields.isdisjoint({"nans", "infs"}):  # what is not finite is counted even if nothing else is there
            return values
        return np.where(columns.count, values, NAN)

    @property
    def powers(self) -> bool:
        """Whether ``measure`` must be asked for ``powers``."""
        return not self.fields.isdisjoint({"m3", "m4"})

    @property
    def magnitudes(self) -> bool:
        """Whether ``measure`` must be asked for ``magnitudes``."""
        return "l1" in self.fields

    @property
    def smallest(self) -> bool:
        """Whether ``measure`` must be asked for ``smallest``."""
        return not self.fields.isdisjoint({"smallest", "zeros"})


def minimum(m: Columns) -> Column:
    """The least element: min x."""
    return m.min


def maximum(m: Columns) -> Column:
    """The greatest element: max x."""
    return m.max


def mean(m: Columns) -> Column:
    """1/n · Σ x."""
    return m.mean


def std(m: Columns) -> Column:
    """√( 1/(n-1) · Σ (x - mean)² ): unbiased, NaN for one element."""
    return np.where(m.count > 1, np.sqrt(m.m2 / (m.count - 1)), NAN)


def l1_norm(m: Columns) -> Column:
    """Σ |x|."""
    return m.l1


def l2_norm(m: Columns) -> Column:
    """√( Σ x² )."""
    return np.hypot(np.sqrt(m.m2), np.sqrt(m.count) * m.mean)


def rms(m: Columns) -> Column:
    """√( 1/n · Σ x² )."""
    return np.hypot(np.sqrt(m.m2 / m.count), m.mean)


def amax(m: Columns) -> Column:
    """The greatest magnitude: max |x|."""
    return np.maximum(-m.min, m.max)


def dynamic_range(m: Columns) -> Column:
    """log₂ max |x| - log₂ min { |x| : x ≠ 0 }, NaN when every x is 0."""
    return np.where((m.smallest > 0) & (m.smallest < math.inf), np.log2(amax(m)) - np.log2(m.smallest), NAN)


def zeros_percent(m: Columns) -> Column:
    """100 · #{ x = 0 } / n."""
    return 100 * m.zeros / m.count


def nans(m: Columns) -> Column:
    """The number of NaNs."""
    return m.nans


def infs(m: Columns) -> Column:
    """The number of infinities, of both signs."""
    return m.infs


def numel(m: Columns) -> Column:
    """The number of elements: n, the NaNs and the infinities."""
    return m.count + m.nans + m.infs


def kurtosis(m: Columns) -> Column:
    """Σ (x - mean)⁴ · n / ( Σ (x - mean)² )²: 3 for a normal distribution (no excess), NaN when all x are equal."""
    return np.where(m.m2 != 0, m.count * (m.m4 / m.m2) / m.m2, NAN)


def _statistic(name: str, formula: Callable[[Columns], Column], *fields: str) -> Statistic:
    return Statistic(name, formula, frozenset(fields), (formula.__doc__ or "").strip())


STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        statistic.name: statistic
        for statistic in (
            _statistic("min", minimum, "count", "min"),
            _statistic("max", maximum, "count", "max"),
            _statistic("mean", mean, "count", "mean"),
            _statistic("std", std, "count", "m2"),
            _statistic("l1_norm", l1_norm, "count", "l1"),
            _statistic("l2_norm", l2_norm, "count", "mean", "m2"),
            _statistic("rms", rms, "count", "mean", "m2"),
            _statistic("amax", amax, "count", "min", "max"),
            _statistic("cur_amax", amax, "count", "min", "max"),
            _statistic("dynamic_range", dynamic_range, "count", "min", "max", "smallest"),
            _statistic("zeros%", zeros_percent, "count", "zeros"),
            _statistic("nans", nans, "nans"),
            _statistic("infs", infs, "infs"),
            _statistic("numel", numel, "count", "nans", "infs"),
            _statistic("kurtosis", kurtosis, "count", "m2", "m4"),
        )
    }
)


def needs(names: Iterable[str]) -> dict[str, bool]:
    """What to ask ``measure`` for, so that these statistics can be computed.

    Example::

        measure(tensor, **needs(["mean", "dynamic_range"]))
    """
    chosen = [STATISTICS[name] for name in names]
    return {field: any(getattr(s, field) for s in chosen) for field in ("powers", "smallest", "magnitudes")}
