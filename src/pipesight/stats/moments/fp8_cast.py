"""The cast to float8, on any device; see :mod:`pipesight.stats.moments.fp8` for what it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from pipesight.stats.moments._tensor_kinds import matrices, plain
from pipesight.stats.moments.fp8 import FORMATS, RECIPES, Fp8Counts
from pipesight.stats.moments.shards import local_part

__all__ = ["measure_fp8"]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2})
LEAST = 5e-324  # what a scale is at least: that of the least float64 would be 0
PIECE = 1 << 16  # elements that are cast at a time


def measure_fp8(
    tensor: Tensor, *, recipe: str = "fp8_current_scaling", format: str = "e4m3", scale_inv: float | None = None
) -> Fp8Counts:
    """Cast a tensor to float8 and count what that does; the tensor is not changed.

    Args:
        tensor: as :func:`pipesight.stats.moments.measuring.measure` takes it.
        recipe: one of :data:`RECIPES`.
        format: one of :data:`FORMATS`.
        scale_inv: a scale of your own for the whole tensor (that of delayed scaling, say), instead of the recipe's.
    """
    for kind, value, known in (("recipe", recipe, RECIPES), ("format", format, FORMATS)):
        if value not in known:
            raise ValueError(f"the {kind} of a float8 cast must be one of {', '.join(known)} (got {value!r})")
    if scale_inv is not None and not 0 < scale_inv < math.inf:
        raise ValueError(f"scale_inv must be a positive number (got {scale_inv})")
    block = None if scale_inv is not None else RECIPES[recipe]
    result = Fp8Counts.EMPTY
    with torch.no_grad():
        numbers = plain(local_part(tensor).tensor)
        if numbers.device.type == "mps":  # has no float64
            numbers = numbers.cpu()
        if block is None and scale_inv is None:
            amax = _amax(numbers)
            scale_inv = max(amax / FORMATS[format], LEAST) if amax else 0.0
        for matrix in matrices(numbers, width=block or 1):
            for part in matrix.split(max(1, PIECE // matrix.size(1))):
                result = result.merge(_cast(part.to(torch.float64), format, block, scale_inv))
    return result


def _amax(numbers: Tensor) -> float:
    """The greatest magnitude of the finite elements, 0 when there is none."""
    most = 0.0
    for matrix in matrices(numbers):
        low, high = (end.item() for end in torch.aminmax(matrix.to(torch.float64)))
        if not max(-low, high) < math.inf:
            low, high = (end.item() for end in torch.aminmax(matrix.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)))
        most = max(most, -low, high)
    return most


def _cast(x: Tensor, format: str, block: int | None, scale_inv: float | None) -> Fp8Counts:
    """Cast a float64 matrix, with one scale or one for each ``block`` elements of a row."""
    dtype, limit = DTYPES[format], FORMATS[format]
    count = x.numel()
    if not x.sum().isfinite():
        count = int(x.isfinite().sum())
        x = x.nan_to_num(0.0, 0.0, 0.0)
    nonzero = int(torch.count_nonzero(x))
    if not nonzero:
        return Fp8Counts(count)
    if block is None:
        scales = torch.full((1,), scale_inv or 0.0, dtype=torch.float64, device=x.device)
        known = scales
    else:
        x = torch.nn.functional.pad(x, (0, -x.size(1) % block)).reshape(-1, block)
        amax = x.abs().amax(1, keepdim=True)
        scales = torch.where(amax > 0, _power_of_two(amax / limit), 0.0)
        known = scales[scales > 0]
        scales = torch.where(scales > 0, scales, 1.0)
    scaled = x / scales
    quantized = scaled.clamp(-limit, limit).to(torch.float32).to(dtype).to(torch.float64)
    error = scaled.sub_(quantized).mul_(scales)
    # max |x| itself never overflows its own scale, whatever rounding makes of 448 * (max / 448).
    over = x.abs() > limit * scales * (1 + 1e-12)
    return Fp8Counts(
        count,
        nonzero,
        int(torch.count_nonzero(quantized)),
        int(over.sum()),
        error.square_().sum().item(),
        known.min().item(),
        known.max().item(),
    )


def _power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below x, between 2**-127 and 2**127."""
    fraction, exponent = torch.frexp(torch.clamp(x, min=2.0**-127))
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp_(-127, 127)
    return torch.ldexp(torch.ones_like(x), exponent)
