"""What is measured of a tensor, and what is logged of it.

A *source* reduces a tensor to a small record that merges: moments, or what the cast to float8 does. A *quantity* is a
number that follows from such a record. Several quantities share one source, so that a tensor is read once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from pipesight.stats.config.rules import StatisticRequest
from pipesight.stats.config_errors import nearest
from pipesight.stats.moments.blockwise import BlockwiseRange, max_blockwise_dynamic_range, measure_blockwise
from pipesight.stats.moments.fp8 import FP8_STATISTICS, Fp8Counts
from pipesight.stats.moments.fp8_cast import measure_fp8
from pipesight.stats.moments.measuring import measure, measure_on_device
from pipesight.stats.moments.moments import Moments
from pipesight.stats.moments.statistic_formulas import STATISTICS

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
    """

    key: str
    measure: Callable[[Tensor], Any]
    from_row: Callable[[Sequence[float]], Any]
    powers: bool = False
    smallest: bool = False


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number to log.

    Attributes:
        label: What it is logged as.
        source: The key of its source.
        make: Makes its source.
        formula: From the record to the number.
    """

    label: str
    source: str
    make: Callable[[], Source]
    formula: Callable[[Any], float]
    powers: bool = False
    smallest: bool = False


def quantity(request: StatisticRequest) -> Quantity:
    """Return the quantity that a configuration asks for by name."""
    statistic = STATISTICS.get(request.name)
    if statistic is not None:
        return Quantity(request.label, MOMENTS, moments, statistic.formula, statistic.powers, statistic.smallest)
    options = dict(request.options)
    if request.name in FP8_STATISTICS:
        fp8 = FP8_STATISTICS[request.name]
        key = f"{fp8.recipe}_{fp8.format}"
        return Quantity(request.label, key, partial(_fp8, key, fp8.recipe, fp8.format), fp8.formula)
    if request.name == BLOCKWISE:
        options = {"block_size": 32, "dims": 1, **options}
        key = f"{BLOCKWISE}_{options['block_size']}_{options['dims']}"
        return Quantity(request.label, key, partial(_blockwise, key, options), max_blockwise_dynamic_range)
    known = (*STATISTICS, *FP8_STATISTICS, BLOCKWISE)
    raise ValueError(f"unknown statistic {request.name!r}{nearest(request.name, known)}")


def moments(*, powers: bool = False, smallest: bool = False) -> Source:
    """Return the source of moments."""

    def reduce(tensor: Tensor) -> Moments:
        of = measure_on_device if tensor.is_cuda else measure
        return of(tensor, powers=powers, smallest=smallest)

    return Source(MOMENTS, reduce, Moments.from_row, powers, smallest)


def _fp8(key: str, recipe: str, format: str) -> Source:
    return Source(key, partial(measure_fp8, recipe=recipe, format=format), Fp8Counts.from_row)


def _blockwise(key: str, options: dict[str, Any]) -> Source:
    return Source(key, partial(measure_blockwise, **options), BlockwiseRange.from_row)


def combine(quantities: Iterable[Quantity]) -> tuple[Source, ...]:
    """Return the sources that serve all of the quantities, each once; moments are always among them, first."""
    chosen = list(quantities)
    sources = {
        MOMENTS: moments(powers=any(q.powers for q in chosen), smallest=any(q.smallest for q in chosen)),
    }
    for q in chosen:
        if q.source not in sources:
            sources[q.source] = q.make()
    return tuple(sources.values())
