"""What a cast to float8 does to a tensor: how much underflows, overflows, and is lost; no Transformer Engine needed.

A tensor x is divided by a scale, rounded to the nearest float8 number q, and stands for q · scale_inv from then on::

    fp8_current_scaling   one scale a tensor:      scale_inv = max |x| / fp8_max
    fp8_block_scaling     one for 128 elements:    scale_inv = the least power of two from max |x| / fp8_max up
    mxfp8                 one for 32 elements:     the same, between 2**-127 and 2**127

Blocks lie along the last dimension; the last one of a row may be shorter. fp8_max is 448 for e4m3 and 57344 for e5m2.
Blocks of zeros have no scale. NaNs and infinities are left out of everything here; moments count them.

Example::

    from pipesight.stats.moments.fp8_cast import measure_fp8

    counts = measure_fp8(gradient, recipe="mxfp8", format="e5m2")
    FP8_STATISTICS["mxfp8_underflows%_e5m2"].formula(counts)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import ClassVar

__all__ = ["FORMATS", "FP8_STATISTICS", "RECIPES", "Fp8Counts", "Fp8Statistic"]

FORMATS: Mapping[str, float] = MappingProxyType({"e4m3": 448.0, "e5m2": 57344.0})  # and their fp8_max
RECIPES: Mapping[str, int | None] = MappingProxyType(
    {"fp8_current_scaling": None, "fp8_block_scaling": 128, "mxfp8": 32}
)  # and the sizes of their blocks


@dataclass(frozen=True, slots=True)
class Fp8Counts:
    """What the cast did to the finite elements of a tensor, or of several, each cast with its own scales.

    Attributes:
        count: finite elements.
        nonzero: elements other than 0.
        nonzero_after: those whose float8 number is not 0.
        over: elements with ``|x| > fp8_max * scale_inv``, which become fp8_max or -fp8_max.
        squared_error: sum of ``(x - q * scale_inv)**2``.
        scale_inv_min: the least ``scale_inv``, ``inf`` when there is none.
        scale_inv_max: the greatest ``scale_inv``, ``-inf`` when there is none.
    """

    count: float = 0.0
    nonzero: float = 0.0
    nonzero_after: float = 0.0
    over: float = 0.0
    squared_error: float = 0.0
    scale_inv_min: float = math.inf
    scale_inv_max: float = -math.inf

    EMPTY: ClassVar[Fp8Counts]

    def merge(self, other: Fp8Counts) -> Fp8Counts:
        """The counts of both."""
        return Fp8Counts(
            self.count + other.count,
            self.nonzero + other.nonzero,
            self.nonzero_after + other.nonzero_after,
            self.over + other.over,
            self.squared_error + other.squared_error,
            min(self.scale_inv_min, other.scale_inv_min),
            max(self.scale_inv_max, other.scale_inv_max),
        )

    def row(self) -> list[float]:
        """The fields as floats, in the order above."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Fp8Counts:
        """The counts that :meth:`row` was called on."""
        return cls(*map(float, row))


Fp8Counts.EMPTY = Fp8Counts()


@dataclass(frozen=True, slots=True)
class Fp8Statistic:
    """A named value that follows from the counts of one recipe and format.

    Attributes:
        name: as a configuration spells it.
        recipe: one of :data:`RECIPES`.
        format: one of :data:`FORMATS`.
        formula: from the counts to the value.
        doc: the formula as text, for the documentation.
    """

    name: str
    recipe: str
    format: str
    formula: Callable[[Fp8Counts], float]
    doc: str


def underflow_percent(c: Fp8Counts) -> float:
    """100 · ( #{ x ≠ 0 } - #{ q ≠ 0 } ) / n."""
    return 100 * (c.nonzero - c.nonzero_after) / c.count if c.count else math.nan


def overflow_percent(c: Fp8Counts) -> float:
    """100 · #{ |x| > fp8_max · scale_inv } / n."""
    return 100 * c.over / c.count if c.count else math.nan


def underflows(c: Fp8Counts) -> float:
    """#{ x ≠ 0 } - #{ q ≠ 0 }."""
    return float(c.nonzero - c.nonzero_after)


def overflows(c: Fp8Counts) -> float:
    """#{ |x| > fp8_max · scale_inv }."""
    return float(c.over)


def mse(c: Fp8Counts) -> float:
    """1/n · Σ (x - q · scale_inv)²."""
    return c.squared_error / c.count if c.count else math.nan


def scale_inv_min(c: Fp8Counts) -> float:
    """The least scale_inv, NaN when every x is 0."""
    return c.scale_inv_min if c.scale_inv_min < math.inf else math.nan


def scale_inv_max(c: Fp8Counts) -> float:
    """The greatest scale_inv, NaN when every x is 0."""
    return c.scale_inv_max if c.scale_inv_max > 0 else math.nan


FORMULAE: Mapping[str, Callable[[Fp8Counts], float]] = MappingProxyType(
    {
        "underflows%": underflow_percent,
        "overflows%": overflow_percent,
        "underflows": underflows,
        "overflows": overflows,
        "mse": mse,
        "scale_inv_min": scale_inv_min,
        "scale_inv_max": scale_inv_max,
    }
)

# [RECIPE_]STATISTIC[_e5m2]: without a recipe current scaling is meant, without a format e4m3.
FP8_STATISTICS: Mapping[str, Fp8Statistic] = MappingProxyType(
    {
        f"{prefix}{name}{suffix}": Fp8Statistic(
            f"{prefix}{name}{suffix}", recipe, format, formula, (formula.__doc__ or "").strip()
        )
        for prefix, recipe in [("", "fp8_current_scaling"), *((f"{recipe}_", recipe) for recipe in RECIPES)]
        for suffix, format in [("", "e4m3"), ("_e5m2", "e5m2")]
        for name, formula in FORMULAE.items()
    }
)
