"""The cast to float8 or float4, on any device; :mod:`pipesight.stats.moments.cast_statistics` says what it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from pipesight.stats.moments._flat_pieces import matrices, plain
from pipesight.stats.moments.cast_statistics import MOST, NVFP4, RECIPES, CastCounts
from pipesight.stats.moments.shards import local_part

__all__ = ["greatest_magnitude", "measure_cast"]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2})
LEAST = 5e-324  # what a scale is at least: that of the least float64 would be 0
PIECE = 1 << 16  # elements that are cast at a time
BLOCKS = ("rows", "columns", "squares")


def measure_cast(
    tensor: Tensor,
    *,
    recipe: str = "fp8_current_scaling",
    format: str | None = None,
    blocks: str = "rows",
    scale_inv: float | None = None,
) -> CastCounts:
    """Cast a tensor and count what that does; the tensor is not changed.

    Args:
        tensor: as :func:`pipesight.stats.moments.cpu_moments.measure` takes it.
        recipe: one of :data:`RECIPES`.
        format: one of the recipe's; by default its usual one.
        blocks: how the blocks of a recipe lie: along ``rows``, the last dimension; ``columns``, all others taken
            together; or ``squares`` of both.
        scale_inv: the scale of the whole tensor, where the recipe is delayed scaling.
    """
    for kind, value, known in (("recipe", recipe, RECIPES), ("blocks", blocks, BLOCKS)):
        if value not in known:
            raise ValueError(f"the {kind} of a cast must be one of {', '.join(known)} (got {value!r})")
    formats = RECIPES[recipe].formats
    format = formats[0] if format is None else format
    if format not in formats:
        raise ValueError(f"the format of a cast by {recipe} must be one of {', '.join(formats)} (got {format!r})")
    if (scale_inv is not None) != (recipe == "fp8_delayed_scaling"):
        raise ValueError(f"scale_inv is for fp8_delayed_scaling, which needs one (got {scale_inv} for {recipe})")
    if scale_inv is not None and not 0 < scale_inv < math.inf:
        raise ValueError(f"scale_inv must be a positive number (got {scale_inv})")
    side = RECIPES[recipe].block
    height, width = 1 if blocks == "rows" else side or 1, 1 if blocks == "columns" else side or 1
    result = CastCounts.EMPTY
    with torch.no_grad():
        numbers = _numbers(tensor)
        if scale_inv is None and (side is None or recipe == NVFP4):
            amax = _amax(numbers)
            scale_inv = max(amax / MOST[format] / (448.0 if recipe == NVFP4 else 1.0), LEAST) if amax else 0.0
        for matrix in matrices(numbers, height, width):
            for part in matrix.split(max(1, PIECE // (matrix.size(1) * height)) * height):
                x, count = _finite(part.to(torch.float64))
                tiles = _tiles(x, height, width) if side is not None else x
                scales = _scales(tiles, side is not None, format, scale_inv)
                result = result.merge(_cast(tiles, scales, count, format))
    return result


def greatest_magnitude(tensor: Tensor) -> float:
    """The greatest magnitude of the finite elements of any tensor, 0 when there is none."""
    with torch.no_grad():
        return _amax(_numbers(tensor))


def _numbers(tensor: Tensor) -> Tensor:
    numbers = plain(local_part(tensor).tensor)
    return numbers.cpu() if numbers.device.type == "mps" else numbers  # which has no float64


def _amax(numbers: Tensor) -> float:
    most = 0.0
    for matrix in matrices(numbers):
        low, high = (end.item() for end in torch.aminmax(matrix.to(torch.float64)))
        if not max(-low, high) < math.inf:
            low, high = (end.item() for end in torch.aminmax(matrix.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)))
        most = max(most, -low, high)
    return most


def _finite(x: Tensor) -> tuple[Tensor, int]:
    """The elements with 0 in place of NaN and infinities, and how many there are without those."""
    if x.sum().isfinite():
        return x, x.numel()
    return x.nan_to_num(0.0, 0.0, 0.0), int(x.isfinite().sum())


def _tiles(x: Tensor, height: int, width: int) -> Tensor:
    """A matrix as a grid of blocks, filled up with zeros: (rows of blocks, height, columns of blocks, width)."""
    x = torch.nn.functional.pad(x, (0, -x.size(1) % width, 0, -x.size(0) % height))
    return x.view(x.size(0) // height, height, x.size(1) // width, width)


def _scales(x: Tensor, blocks: bool, format: str, scale_inv: float | None) -> Tensor:
    """The scale of a tensor, or those of its blocks; 0 where there is none."""
    if not blocks:
        return torch.full((1,), scale_inv or 0.0, dtype=torch.float64, device=x.device)
    wanted = x.abs().amax((1, 3), keepdim=True) / MOST[format]
    if scale_inv is None:
        return torch.where(wanted > 0, _power_of_two(wanted), 0.0)
    nearest = (wanted / (scale_inv or 1.0)).clamp(max=448.0).to(torch.float32).to(torch.float8_e4m3fn)
    return nearest.to(torch.float64) * scale_inv


def _cast(x: Tensor, scales: Tensor, count: int, format: str) -> CastCounts:
    """Cast float64 numbers with scales that fit them."""
    nonzero = int(torch.count_nonzero(x))
    if not nonzero:
        return CastCounts(count)
    known = scales[scales > 0]
    divisors = torch.where(scales > 0, scales, 1.0)
    most = MOST[format]
    scaled = x / divisors
    quantized = _rounded(scaled.clamp(-most, most), format)
    if known.numel() < scales.numel():
        quantized = torch.where(scales > 0, quantized, 0.0)
    error = scaled.sub_(quantized).mul_(divisors)
    # max |x| itself never overflows its own scale, whatever rounding makes of 448 * (max / 448).
    over = (x.abs() > most * scales * (1 + 1e-12)) & (scales > 0)
    return CastCounts(
        count,
        nonzero,
        int(torch.count_nonzero(quantized)),
        int(over.sum()),
        error.square_().sum().item(),
        known.min().item() if known.numel() else math.inf,
        known.max().item() if known.numel() else -math.inf,
    )


def _rounded(x: Tensor, format: str) -> Tensor:
    """The nearest numbers of a format; of two that are as near, the one with an even last bit."""
    if format in DTYPES:
        return x.to(torch.float32).to(DTYPES[format]).to(torch.float64)
    size = x.abs()  # e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step)


def _power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below x, between 2**-127 and 2**127."""
    fraction, exponent = torch.frexp(torch.clamp(x, min=2.0**-127))
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp_(-127, 127)
    return torch.ldexp(torch.ones_like(x), exponent)
