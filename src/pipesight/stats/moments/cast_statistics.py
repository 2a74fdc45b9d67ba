"""What a cast to float8 or float4 does to a tensor: how much underflows, overflows, and is lost.

A tensor x is divided by a scale, rounded to the nearest number q of the format, and stands for q · scale_inv::

    fp8_current_scaling   one scale a tensor:      scale_inv = max |x| / most
    fp8_delayed_scaling   one scale a tensor:      the same, of max |x| in earlier steps
    fp8_block_scaling     one for 128 elements:    scale_inv = the least power of two from max |x| / most up
    mxfp8                 one for 32 elements:     the same, between 2**-127 and 2**127
    nvfp4                 one for 16 elements:     scale_inv = s · the e4m3 number nearest to max |x| / most / s
                          and s for the tensor:    s = max |x| of the tensor / most / 448

``most`` is the greatest number of the format: 448 for e4m3, 57344 for e5m2, 6 for e2m1, which is that of nvfp4.
Blocks lie along the last dimension or, columnwise, along all others taken together; those at the edges may be shorter.
Those of weights are squares in fp8_block_scaling and nvfp4, as Transformer Engine trains.
Blocks of zeros have no scale. NaNs and infinities are left out of everything here; moments count them.

Example::

    from pipesight.stats.moments.casting import measure_cast

    counts = measure_cast(gradient, recipe="mxfp8", format="e5m2")
    CAST_STATISTICS["mxfp8_underflows%_e5m2"].formula(counts)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import ClassVar

__all__ = ["CAST_STATISTICS", "MOST", "NVFP4", "RECIPES", "CastCounts", "CastStatistic", "Recipe"]

NVFP4 = "nvfp4"
MOST: Mapping[str, float] = MappingProxyType({"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0})  # of a format


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is scaled.

    Attributes:
        block: The elements along a side of a block; ``None`` for one scale a tensor.
        square_weights: Whether the blocks of weights are squares.
        formats: The formats it casts to, the usual one first.
    """

    block: int | None = None
    square_weights: bool = False
    formats: tuple[str, ...] = ("e4m3", "e5m2")


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "fp8_current_scaling": Recipe(),
        "fp8_delayed_scaling": Recipe(),
        "fp8_block_scaling": Recipe(128, square_weights=True),
        "mxfp8": Recipe(32),
        NVFP4: Recipe(16, square_weights=True, formats=("e2m1",)),
    }
)


@dataclass(frozen=True, slots=True)
class CastCounts:
    """What the cast did to the finite elements of a tensor, or of several, each cast with its own scales.

    Attributes:
        count: finite elements.
        nonzero: elements other than 0.
        nonzero_after: those that are not 0 afterwards.
        over: elements with ``|x| > most * scale_inv``, which become the greatest or the least number.
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

    EMPTY: ClassVar[CastCounts]

    def merge(self, other: CastCounts) -> CastCounts:
        """The counts of both."""
        return CastCounts(
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
    def from_row(cls, row: Sequence[float]) -> CastCounts:
        """The counts that :meth:`row` was called on."""
        return cls(*map(float, row))


CastCounts.EMPTY = CastCounts()


@dataclass(frozen=True, slots=True)
class CastStatistic:
    """A named value that follows from the counts of one recipe and format.

    Attributes:
        name: as a configuration spells it.
        recipe: one of :data:`RECIPES`.
        format: one of the recipe's.
        columnwise: whether blocks lie along the other dimensions.
        formula: from the counts to the value.
        doc: the formula as text, for the documentation.
    """

    name: str
    recipe: str
    format: str
    columnwise: bool
    formula: Callable[[CastCounts], float]
    doc: str


def underflow_percent(c: CastCounts) -> float:
    """100 · ( #{ x ≠ 0 } - #{ q · scale_inv ≠ 0 } ) / n."""
    return 100 * (c.nonzero - c.nonzero_after) / c.count if c.count else math.nan


def overflow_percent(c: CastCounts) -> float:
    """100 · #{ |x| > most · scale_inv } / n."""
    return 100 * c.over / c.count if c.count else math.nan


def underflows(c: CastCounts) -> float:
    """#{ x ≠ 0 } - #{ q · scale_inv ≠ 0 }."""
    return float(c.nonzero - c.nonzero_after)


def overflows(c: CastCounts) -> float:
    """#{ |x| > most · scale_inv }."""
    return float(c.over)


def mse(c: CastCounts) -> float:
    """1/n · Σ (x - q · scale_inv)²."""
    return c.squared_error / c.count if c.count else math.nan


def scale_inv_min(c: CastCounts) -> float:
    """The least scale_inv, NaN when every x is 0."""
    return c.scale_inv_min if c.scale_inv_min < math.inf else math.nan


def scale_inv_max(c: CastCounts) -> float:
    """The greatest scale_inv, NaN when every x is 0."""
    return c.scale_inv_max if c.scale_inv_max > 0 else math.nan


FORMULAE: Mapping[str, Callable[[CastCounts], float]] = MappingProxyType(
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


def _statistics() -> Iterator[CastStatistic]:
    """Yield [RECIPE_]NAME[_columnwise][_e5m2]: without a recipe, current scaling is meant."""
    for prefix, recipe in [("", "fp8_current_scaling"), *((f"{recipe}_", recipe) for recipe in RECIPES)]:
        usual, *others = RECIPES[recipe].formats
        for format, suffix in [(usual, ""), *((other, f"_{other}") for other in others)]:
            for columnwise in (False, True) if RECIPES[recipe].block else (False,):
                way = "_columnwise" if columnwise else ""
                for name, formula in FORMULAE.items():
                    doc = (formula.__doc__ or "").strip()
                    yield CastStatistic(f"{prefix}{name}{way}{suffix}", recipe, format, columnwise, formula, doc)


CAST_STATISTICS: Mapping[str, CastStatistic] = MappingProxyType({each.name: each for each in _statistics()})
