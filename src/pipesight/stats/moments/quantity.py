"""What is measured of a tensor, and what is logged of it.

A *source* reduces a tensor to a small record that merges: moments, or what a cast to float8 or float4 does. A
*quantity* is a number that follows from such a record. Several quantities share one source, so that a tensor is read
once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipesight.stats.config.rules import StatisticRequest
from pipesight.stats.config_errors import nearest
from pipesight.stats.moments.blockwise_range import BlockwiseRange, max_blockwise_dynamic_range, measure_blockwise
from pipesight.stats.moments.cast_statistics import CAST_STATISTICS, RECIPES, CastCounts, CastStatistic
from pipesight.stats.moments.casting import measure_cast
from pipesight.stats.moments.cpu_moments import measure, measure_on_device
from pipesight.stats.moments.moments import Moments
from pipesight.stats.moments.statistic_formulas import STATISTICS, needs

__all__ = ["BLOCKWISE", "MOMENTS", "Quantity", "Source", "combine", "quantity"]

MOMENTS = "moments"
BLOCKWISE = "max_blockwise_dynamic_range"


@dataclass(frozen=True, slots=True)
class Source:
    """A way to reduce a tensor.

    Attributes:
        key: What tells it from other sources, on all ranks.
        measure: From the tensor to the record, which has ``merge`` and ``row``.
        from_row: From the numbers of the record to the record.
        powers: Of moments: with the third and fourth.
        smallest: Of moments: with zeros and the smallest magnitude.
        magnitudes: Of moments: with the sum of magnitudes.
        delayed: Of casts: the format, where the scale is that of earlier steps. Then the session measures.
    """

    key: str
    measure: Callable[[Tensor], Any]
    from_row: Callable[[Sequence[float]], Any]
    powers: bool = False
    smallest: bool = False
    magnitudes: bool = False
    delayed: str | None = None


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number to log.

    Attributes:
        label: What it is logged as.
        source: The key of its source.
        make: Makes its source.
        formula: From the record to the number.
        formulas: Of moments: from rows of them to the numbers.
    """

    label: str
    source: str
    make: Callable[[], Source]
    formula: Callable[[Any], float]
    formulas: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None
    powers: bool = False
    smallest: bool = False
    magnitudes: bool = False


def quantity(request: StatisticRequest, tensor: str) -> Quantity:
    """Return the quantity that a configuration asks for by name.

    Args:
        request: The statistic.
        tensor: The name of the tensor that it is of.
    """
    statistic = STATISTICS.get(request.name)
    if statistic is not None:
        of_one, of_many = statistic.formula, statistic.formulas
        asked = needs([request.name])
        return Quantity(request.label, MOMENTS, moments, of_one, of_many, **asked)
    if request.name in CAST_STATISTICS:
        cast = CAST_STATISTICS[request.name]
        blocks = "columns" if cast.columnwise else "rows"
        if tensor == "weight" and RECIPES[cast.recipe].square_weights:
            blocks = "squares"
        key = f"{cast.recipe}_{cast.format}_{blocks}"
        return Quantity(request.label, key, partial(_cast, key, cast, blocks), cast.formula)
    if request.name == BLOCKWISE:
        options = {"block_size": 32, "dims": 1, **dict(request.options)}
        key = "_".join([BLOCKWISE, *map(str, options.values())])
        return Quantity(request.label, key, partial(_blockwise, key, options), max_blockwise_dynamic_range)
    known = (*STATISTICS, *CAST_STATISTICS, BLOCKWISE)
    raise ValueError(f"unknown statistic {request.name!r}{nearest(request.name, known)}")


def moments(*, powers: bool = False, smallest: bool = False, magnitudes: bool = False) -> Source:
    """Return the source of moments."""

    def reduce(tensor: Tensor) -> Moments:
        of = measure_on_device if tensor.is_cuda else measure
        return of(tensor, powers=powers, smallest=smallest, magnitudes=magnitudes)

    return Source(MOMENTS, reduce, Moments.from_row, powers, smallest, magnitudes)


def _cast(key: str, cast: CastStatistic, blocks: str) -> Source:
    measured = partial(measure_cast, recipe=cast.recipe, format=cast.format, blocks=blocks)
    delayed = cast.format if cast.recipe == "fp8_delayed_scaling" else None
    return Source(key, measured, CastCounts.from_row, delayed=delayed)


def _blockwise(key: str, options: dict[str, Any]) -> Source:
    return Source(key, partial(measure_blockwise, **options), BlockwiseRange.from_row)


def combine(quantities: Iterable[Quantity]) -> tuple[Source, ...]:
    """Return the sources that serve all of the quantities, each once; moments are always among them, first."""
    chosen = list(quantities)
    sources = {
        MOMENTS: moments(
            powers=any(q.powers for q in chosen),
            smallest=any(q.smallest for q in chosen),
            magnitudes=any(q.magnitudes for q in chosen),
        ),
    }
    for q in chosen:
        if q.source not in sources:
            sources[q.source] = q.make()
    return tuple(sources.values())
