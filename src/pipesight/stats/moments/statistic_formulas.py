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

from pipesight.stats.moments.moments import Moments

__all__ = ["STATISTICS", "Statistic", "needs"]

NAN = math.nan


@dataclass(frozen=True, slots=True)
class Statistic:
    """A named value that follows from moments.

    Attributes:
        name: as a configuration spells it.
        formula: from the moments to the value.
        fields: the fields of the moments that it reads.
        doc: the formula as text, for the documentation.
    """

    name: str
    formula: Callable[[Moments], float]
    fields: frozenset[str]
    doc: str

    @property
    def powers(self) -> bool:
        """Whether ``measure`` must be asked for ``powers``."""
        return not self.fields.isdisjoint({"m3", "m4"})

    @property
    def smallest(self) -> bool:
        """Whether ``measure`` must be asked for ``smallest``."""
        return not self.fields.isdisjoint({"smallest", "zeros"})


def minimum(m: Moments) -> float:
    """The least element: min x."""
    return m.min if m.count else NAN


def maximum(m: Moments) -> float:
    """The greatest element: max x."""
    return m.max if m.count else NAN


def mean(m: Moments) -> float:
    """1/n · Σ x."""
    return m.mean if m.count else NAN


def std(m: Moments) -> float:
    """√( 1/(n-1) · Σ (x - mean)² ): unbiased, NaN for one element."""
    return math.sqrt(m.m2 / (m.count - 1)) if m.count > 1 else NAN


def l1_norm(m: Moments) -> float:
    """Σ |x|."""
    return m.l1 if m.count else NAN


def l2_norm(m: Moments) -> float:
    """√( Σ x² )."""
    return math.hypot(math.sqrt(m.m2), math.sqrt(m.count) * m.mean) if m.count else NAN


def rms(m: Moments) -> float:
    """√( 1/n · Σ x² )."""
    return math.hypot(math.sqrt(m.m2 / m.count), m.mean) if m.count else NAN


def amax(m: Moments) -> float:
    """The greatest magnitude: max |x|."""
    return m.amax


def dynamic_range(m: Moments) -> float:
    """log₂ max |x| - log₂ min { |x| : x ≠ 0 }, NaN when every x is 0."""
    if not m.count or not 0 < m.smallest < math.inf:
        return NAN
    return math.log2(m.amax) - math.log2(m.smallest)


def zeros_percent(m: Moments) -> float:
    """100 · #{ x = 0 } / n."""
    return 100 * m.zeros / m.count if m.count else NAN


def nans(m: Moments) -> float:
    """The number of NaNs."""
    return float(m.nans)


def infs(m: Moments) -> float:
    """The number of infinities, of both signs."""
    return float(m.infs)


def numel(m: Moments) -> float:
    """The number of elements: n, the NaNs and the infinities."""
    return float(m.count + m.nans + m.infs)


def kurtosis(m: Moments) -> float:
    """Σ (x - mean)⁴ · n / ( Σ (x - mean)² )²: 3 for a normal distribution (no excess), NaN when all x are equal."""
    return m.count * (m.m4 / m.m2) / m.m2 if m.count and m.m2 else NAN


def _statistic(name: str, formula: Callable[[Moments], float], *fields: str) -> Statistic:
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
    return {"powers": any(s.powers for s in chosen), "smallest": any(s.smallest for s in chosen)}
