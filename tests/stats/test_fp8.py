"""What a cast to float8 does is counted right, for one scale a tensor and for blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipesight.stats.moments.blockwise import BlockwiseRange, max_blockwise_dynamic_range, measure_blockwise
from pipesight.stats.moments.fp8 import FORMATS, FP8_STATISTICS, RECIPES, Fp8Counts
from pipesight.stats.moments.fp8_cast import measure_fp8

E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E5M2 = [m / 4 * 2.0**-14 for m in range(4)] + [(1 + m / 4) * 2.0 ** (e - 15) for e in range(1, 31) for m in range(4)]
NUMBERS = {"e4m3": torch.tensor(E4M3, dtype=torch.float64), "e5m2": torch.tensor(E5M2, dtype=torch.float64)}


def nearest(x: torch.Tensor, format: str) -> torch.Tensor:
    """The float8 number nearest to x, from the list of all of them; the even one of two."""
    numbers = NUMBERS[format]
    size = x.abs().clamp(max=numbers[-1].item())
    above = torch.searchsorted(numbers, size).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    up = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return torch.where(up, high, low) * x.sign()


def reference(x: torch.Tensor, recipe: str, format: str) -> Fp8Counts:
    """Block after block, as the definitions read."""
    limit = NUMBERS[format][-1].item()
    rows = x.detach().double().reshape(-1, x.size(-1) if x.dim() else 1)
    blocks = [rows.flatten()] if RECIPES[recipe] is None else [b for r in rows for b in r.split(RECIPES[recipe])]
    result = Fp8Counts.EMPTY
    for block in blocks:
        block = block[block.isfinite()]
        amax = block.abs().max().item() if block.numel() else 0.0
        if not amax:
            result = result.merge(Fp8Counts(block.numel()))
            continue
        scale = amax / limit
        if RECIPES[recipe] is not None:
            scale = 2.0 ** max(-127, math.ceil(math.log2(scale)))
        q = nearest(block / scale, format)
        counts = [block.numel(), (block != 0).sum().item(), (q != 0).sum().item(), 0]
        result = result.merge(Fp8Counts(*counts, (block - q * scale).square().sum().item(), scale, scale))
    return result


def assert_same(got: Fp8Counts, expected: Fp8Counts) -> None:
    assert got.row()[:4] == expected.row()[:4]
    assert got.row()[4:] == pytest.approx(expected.row()[4:], rel=1e-9)


def spread(*shape: int) -> torch.Tensor:
    """Magnitudes from 1e-12 up, and zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 12 - 12)
    return x * (torch.rand(shape, generator=generator) > 0.1)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(), (7,), (3, 64), (5, 33), (2, 3, 300), (40, 5000)], ids=str)
def test_against_the_definition(recipe, format, shape):
    """Counts, error and scales are those of rounding to the nearest number of the format, ragged blocks too."""
    x = spread(*shape) if shape else torch.tensor(0.3)
    assert_same(measure_fp8(x, recipe=recipe, format=format), reference(x, recipe, format))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_dtypes(recipe, dtype):
    """Other dtypes are cast from the values they hold."""
    x = spread(30, 70).to(dtype)
    assert_same(measure_fp8(x, recipe=recipe), reference(x, recipe, "e4m3"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_nonfinite(recipe):
    """NaNs and infinities are left out, and do not spoil the scale of the others."""
    x = spread(4, 64)
    x[0, 0], x[1, 5], x[2, 7] = math.nan, math.inf, -math.inf
    counts = measure_fp8(x, recipe=recipe)
    assert counts.count == 253
    assert_same(counts, reference(x, recipe, "e4m3"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros(recipe):
    """Zeros neither underflow nor have a scale; an empty tensor is nothing."""
    assert measure_fp8(torch.zeros(5, 40), recipe=recipe) == Fp8Counts(200)
    assert measure_fp8(torch.empty(0, 40), recipe=recipe) == Fp8Counts.EMPTY


@given(st.floats(1e-30, 1e30))
def test_nothing_overflows_its_own_scale(amax):
    """The greatest magnitude is the greatest number of the format, whatever rounding does to the scale."""
    counts = measure_fp8(torch.tensor([amax, -amax], dtype=torch.float64))
    assert counts.over == 0
    assert counts.squared_error <= 1e-24 * amax * amax


@pytest.mark.parametrize("recipe", RECIPES)
def test_long_rows(recipe):
    """Blocks do not fall apart where a long row is taken in pieces."""
    x = spread(3000 * 384)
    assert_same(measure_fp8(x, recipe=recipe), measure_fp8(x.view(3000, 384), recipe=recipe))
    assert measure_blockwise(x, block_size=384) == measure_blockwise(x.view(3000, 384), block_size=384)


@pytest.mark.parametrize("recipe", RECIPES)
def test_transposed(recipe):
    """Blocks of a transposed matrix are those of its copy."""
    x = spread(256, 128).t()
    assert_same(measure_fp8(x, recipe=recipe), measure_fp8(x.contiguous(), recipe=recipe))


def test_scale_of_ones_own():
    """With a scale that is too small elements overflow; with one too large they underflow."""
    x = torch.tensor([1.0, 2.0, -3.0, 500.0, -1e-5])
    assert measure_fp8(x, scale_inv=1.0).over == 1
    assert measure_fp8(x, scale_inv=2.0 / 448).over == 2
    counts = measure_fp8(x, scale_inv=1.0)
    assert (counts.nonzero, counts.nonzero_after, counts.scale_inv_min) == (5, 4, 1.0)
    assert counts.squared_error == pytest.approx(52**2 + 1e-10)


def test_input_is_left_alone():
    """The cast is of a copy, also where NaNs and infinities are left out."""
    x = spread(4, 64).double()
    x[0, 0], x[1, 5], x[2, 7] = math.nan, math.inf, -math.inf
    x.requires_grad_()
    before = x.detach().clone()
    for recipe in RECIPES:
        measure_fp8(x, recipe=recipe)
    measure_blockwise(x, block_size=7)
    assert torch.equal(x.detach().nan_to_num(7.0), before.nan_to_num(7.0))


def test_merge():
    """Counts of several tensors add up, each with its own scale, and cross the network as rows."""
    x, y = spread(3, 64), spread(2, 40) * 1000
    a, b = measure_fp8(x), measure_fp8(y)
    merged = a.merge(b)
    assert merged == b.merge(a) == Fp8Counts.from_row(merged.row())
    assert merged.merge(Fp8Counts.EMPTY) == merged
    assert (merged.scale_inv_min, merged.scale_inv_max) == (a.scale_inv_min, b.scale_inv_max)
    assert merged.nonzero_after == a.nonzero_after + b.nonzero_after


@pytest.mark.parametrize("prefix", ["", "fp8_current_scaling_", "fp8_block_scaling_", "mxfp8_"])
@pytest.mark.parametrize("suffix", ["", "_e5m2"])
def test_statistics(prefix, suffix):
    """Names carry recipe and format; values follow from the counts."""
    x = spread(30, 70)
    recipe, format = prefix.rstrip("_") or "fp8_current_scaling", suffix.lstrip("_") or "e4m3"
    counts = reference(x, recipe, format)
    under = counts.nonzero - counts.nonzero_after
    expected = {
        "underflows%": 100 * under / x.numel(),
        "overflows%": 0.0,
        "underflows": under,
        "overflows": 0.0,
        "mse": counts.squared_error / x.numel(),
        "scale_inv_min": counts.scale_inv_min,
        "scale_inv_max": counts.scale_inv_max,
    }
    for name, value in expected.items():
        statistic = FP8_STATISTICS[f"{prefix}{name}{suffix}"]
        assert statistic.formula(measure_fp8(x, recipe=statistic.recipe, format=statistic.format)) == pytest.approx(
            value
        )


def test_statistics_of_nothing():
    """Without elements shares and scales are NaN, counts 0."""
    values = {name: statistic.formula(Fp8Counts.EMPTY) for name, statistic in FP8_STATISTICS.items()}
    assert {name for name, value in values.items() if value == 0} == {
        name for name in values if name.removesuffix("_e5m2").endswith("flows")
    }
    assert sum(map(math.isnan, values.values())) == len(values) * 5 // 7


def test_wrong_recipe():
    """Unknown recipes, formats and scales are refused with what there is."""
    for wrong in ({"recipe": "fp4"}, {"format": "e3m4"}):
        with pytest.raises(ValueError, match="must be one of"):
            measure_fp8(torch.ones(3), **wrong)
    with pytest.raises(ValueError, match="must be a positive number"):
        measure_fp8(torch.ones(3), scale_inv=0.0)


@pytest.mark.parametrize("block_size", [1, 4, 32, 100])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("shape", [(7,), (8, 64), (2, 5, 33)], ids=str)
def test_blockwise(block_size, dims, shape):
    """The range is the greatest over blocks that lie along rows, or squares; those at the edges may be smaller."""
    x = spread(*shape)
    height = block_size if dims == 2 else 1
    rows = x.double().abs().reshape(-1, shape[-1])
    blocks = [block for band in rows.split(height) for block in band.split(block_size, 1)]
    ranges = [b[b > 0].max().log2() - b[b > 0].min().log2() for b in blocks if b.any()]
    record = measure_blockwise(x, block_size=block_size, dims=dims)
    assert max_blockwise_dynamic_range(record) == pytest.approx(max(ranges).item(), abs=1e-12)


def test_blockwise_of_many_rows():
    """Blocks do not fall apart where a large tensor is taken in pieces."""
    x = torch.ones(5000, 700)
    x[1498:1500, 0] = torch.tensor([2.0**20, 2.0**-20])
    x[1501, 0] = 2.0**-60  # in another square
    assert measure_blockwise(x, block_size=500, dims=2).value == 60
    assert measure_blockwise(x, block_size=1500, dims=2).value == 60
    x[1501, 0] = 1
    assert measure_blockwise(x, block_size=500, dims=2).value == 40


def test_blockwise_edges():
    """Zeros have no range, NaNs do not count, the greater record wins a merge, and wrong sizes are refused."""
    assert math.isnan(max_blockwise_dynamic_range(measure_blockwise(torch.zeros(5), block_size=2)))
    assert measure_blockwise(torch.tensor([math.nan, 4.0, 1.0, math.inf]), block_size=4).value == 2
    a, b = BlockwiseRange(3.0), BlockwiseRange(5.0)
    assert a.merge(b) == b.merge(a) == b == BlockwiseRange.from_row(b.merge(BlockwiseRange.EMPTY).row())
    with pytest.raises(ValueError, match="positive whole number"):
        measure_blockwise(torch.ones(3), block_size=0)
    with pytest.raises(ValueError, match="dims must be 1"):
        measure_blockwise(torch.ones(3), block_size=2, dims=3)
