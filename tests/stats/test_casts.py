"""What a cast to float8 or float4 does is counted right, for one scale a tensor, for blocks, and for both at once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipesight.stats.moments.blockwise_range import BlockwiseRange, max_blockwise_dynamic_range, measure_blockwise
from pipesight.stats.moments.cast_statistics import CAST_STATISTICS, CastCounts
from pipesight.stats.moments.casting import measure_cast
from pipesight.stats.moments.delayed_scaling import DelayedScaling

# Every magnitude of a format, in order of its bits.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E5M2 = [m / 4 * 2.0**-14 for m in range(4)] + [(1 + m / 4) * 2.0 ** (e - 15) for e in range(1, 31) for m in range(4)]
NUMBERS = {name: torch.tensor(t, dtype=torch.float64) for name, t in [("e2m1", E2M1), ("e4m3", E4M3), ("e5m2", E5M2)]}
SIDES = {"fp8_current_scaling": None, "fp8_block_scaling": 128, "mxfp8": 32, "nvfp4": 16}
CASTS = [(recipe, format) for recipe in SIDES for format in (["e2m1"] if recipe == "nvfp4" else ["e4m3", "e5m2"])]
BLOCKS = ("rows", "columns", "squares")


def nearest(x: torch.Tensor, format: str) -> torch.Tensor:
    """The number of a format nearest to x, from the list of all of them; the even one of two."""
    numbers = NUMBERS[format]
    size = x.abs().clamp(max=numbers[-1].item())
    above = torch.searchsorted(numbers, size).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    up = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return torch.where(up, high, low) * x.sign()


def greatest(x: torch.Tensor) -> float:
    """The greatest finite magnitude."""
    return x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0


def reference(x: torch.Tensor, recipe: str, format: str | None = None, blocks: str = "rows") -> CastCounts:
    """Block after block, as the definitions read."""
    format = format or ("e2m1" if recipe == "nvfp4" else "e4m3")
    limit = NUMBERS[format][-1].item()
    matrix = x.detach().double().reshape(-1, x.size(-1) if x.dim() else 1)
    side = SIDES[recipe]
    parts = [matrix]
    if side is not None:
        bands = matrix.split(1 if blocks == "rows" else side)
        parts = [block for band in bands for block in band.split(1 if blocks == "columns" else side, 1)]
    whole = greatest(matrix) / limit / 448
    result = CastCounts.EMPTY
    for part in parts:
        block = part[part.isfinite()]
        scale = greatest(block) / limit
        if not scale:
            result = result.merge(CastCounts(block.numel()))
            continue
        if recipe == "nvfp4":
            scale = nearest(torch.tensor(scale / whole, dtype=torch.float64), "e4m3").item() * whole
        elif side is not None:
            scale = 2.0 ** max(-127, math.ceil(math.log2(scale)))
        if scale:
            q, scales = nearest(block / scale, format), (scale, scale)
            over = (block.abs() > limit * scale * (1 + 1e-12)).sum().item()
        else:  # it is too small beside other blocks: nothing is left of it
            q, scales, over = torch.zeros_like(block), (math.inf, -math.inf), 0
        counts = [block.numel(), (block != 0).sum().item(), (q != 0).sum().item(), over]
        result = result.merge(CastCounts(*counts, (block - q * scale).square().sum().item(), *scales))
    return result


def assert_same(got: CastCounts, expected: CastCounts) -> None:
    assert got.row()[:4] == expected.row()[:4]
    assert got.row()[4:] == pytest.approx(expected.row()[4:], rel=1e-9)


def spread(*shape: int) -> torch.Tensor:
    """Magnitudes from 1e-12 up, and zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 12 - 12)
    return x * (torch.rand(shape, generator=generator) > 0.1)


@pytest.mark.parametrize(("recipe", "format"), CASTS)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", [(), (7,), (3, 64), (5, 33), (2, 3, 300), (140, 700)], ids=str)
def test_against_the_definition(recipe, format, blocks, shape):
    """Counts, error and scales are those of rounding to the nearest number of the format, ragged blocks too."""
    x = spread(*shape) if shape else torch.tensor(0.3)
    assert_same(measure_cast(x, recipe=recipe, format=format, blocks=blocks), reference(x, recipe, format, blocks))


def test_every_float4_number():
    """Numbers of float4 stay what they are; those halfway between two go to the even one; the sign stays."""
    halfway = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    for sign in (1.0, -1.0):
        for value, expected in [*zip(E2M1, E2M1, strict=True), *zip(halfway, even, strict=True)]:
            x = torch.zeros(16)
            x[0], x[1] = 6.0, value * sign  # 6 in the block makes its scale 1
            counts = measure_cast(x, recipe="nvfp4")
            assert (counts.scale_inv_min, counts.scale_inv_max) == (pytest.approx(1.0), pytest.approx(1.0))
            assert counts.squared_error == pytest.approx((value - expected) ** 2, abs=1e-24)
            assert counts.nonzero - counts.nonzero_after == (value != 0 and expected == 0)


def test_block_that_the_tensor_outweighs():
    """Of a block far below the rest of its tensor, the float8 scale is 0, and all of it underflows."""
    x = torch.cat([torch.full((16,), 1000.0), torch.full((16,), 1e-4)])
    counts = measure_cast(x, recipe="nvfp4")
    assert (counts.nonzero, counts.nonzero_after, counts.over) == (32, 16, 0)
    assert counts.squared_error == pytest.approx(16 * 1e-8, rel=1e-6)
    assert_same(counts, reference(x, "nvfp4"))


@pytest.mark.parametrize("recipe", SIDES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_dtypes(recipe, dtype):
    """Other dtypes are cast from the values they hold."""
    x = spread(30, 70).to(dtype)
    assert_same(measure_cast(x, recipe=recipe), reference(x, recipe))


@pytest.mark.parametrize("recipe", SIDES)
def test_nonfinite(recipe):
    """NaNs and infinities are left out, and do not spoil the scale of the others."""
    x = spread(4, 64)
    x[0, 0], x[1, 5], x[2, 7] = math.nan, math.inf, -math.inf
    counts = measure_cast(x, recipe=recipe)
    assert counts.count == 253
    assert_same(counts, reference(x, recipe))


@pytest.mark.parametrize("recipe", SIDES)
def test_zeros(recipe):
    """Zeros neither underflow nor have a scale; an empty tensor is nothing."""
    assert measure_cast(torch.zeros(5, 40), recipe=recipe) == CastCounts(200)
    assert measure_cast(torch.empty(0, 40), recipe=recipe) == CastCounts.EMPTY


@given(st.floats(1e-30, 1e30))
def test_nothing_overflows_its_own_scale(amax):
    """The greatest magnitude is the greatest number of the format, whatever rounding does to the scale."""
    counts = measure_cast(torch.tensor([amax, -amax], dtype=torch.float64))
    assert counts.over == 0
    assert counts.squared_error <= 1e-24 * amax * amax


@pytest.mark.parametrize("recipe", SIDES)
def test_long_rows(recipe):
    """Blocks do not fall apart where a long row is taken in pieces."""
    x = spread(3000 * 384)
    assert_same(measure_cast(x, recipe=recipe), measure_cast(x.view(3000, 384), recipe=recipe))
    assert measure_blockwise(x, block_size=384) == measure_blockwise(x.view(3000, 384), block_size=384)


@pytest.mark.parametrize("recipe", SIDES)
def test_transposed(recipe):
    """Blocks of a transposed matrix are those of its copy."""
    x = spread(256, 128).t()
    assert_same(measure_cast(x, recipe=recipe), measure_cast(x.contiguous(), recipe=recipe))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_blocks_do_not_fall_apart(blocks):
    """Blocks are whole where a large matrix is taken in pieces."""
    x = spread(700, 1000)
    assert_same(measure_cast(x, recipe="mxfp8", blocks=blocks), reference(x, "mxfp8", blocks=blocks))


def test_scale_that_is_given():
    """With a scale that is too small elements overflow; with one too large they underflow."""
    x = torch.tensor([1.0, 2.0, -3.0, 500.0, -1e-5])
    assert measure_cast(x, recipe="fp8_delayed_scaling", scale_inv=1.0).over == 1
    assert measure_cast(x, recipe="fp8_delayed_scaling", scale_inv=2.0 / 448).over == 2
    counts = measure_cast(x, recipe="fp8_delayed_scaling", scale_inv=1.0)
    assert (counts.nonzero, counts.nonzero_after, counts.scale_inv_min) == (5, 4, 1.0)
    assert counts.squared_error == pytest.approx(52**2 + 1e-10)


def test_delayed_scaling():
    """The scale of a step is that of the greatest magnitude of steps before it, whatever the calls within a step."""
    scaling = DelayedScaling()
    calls = [(0, 448.0), (0, 896.0), (1, 2000.0), (2, 10.0), (2, 10.0), (7, 1.0)]
    found = [scaling.measure("fc1", step, torch.tensor([amax, 1.0]), format="e4m3") for step, amax in calls]
    assert [counts.scale_inv_max for counts in found] == pytest.approx([1, 1, 2, 2000 / 448, 2000 / 448, 2000 / 448])
    assert [counts.over for counts in found] == [0, 1, 1, 0, 0, 0]
    assert scaling.measure("fc2", 7, torch.tensor([2.0]), format="e5m2").scale_inv_max == 1.0


def test_delayed_scaling_forgets():
    """A magnitude counts for 1024 steps; zeros, NaNs and infinities never do."""
    scaling = DelayedScaling()
    scaling.measure("x", 0, torch.tensor([896.0]), format="e4m3")
    scales = [
        scaling.measure("x", step, torch.tensor([448.0, math.inf, math.nan, 0.0]), format="e4m3").scale_inv_max
        for step in range(1, 1027)
    ]
    assert scales == [2.0] * 1024 + [1.0] * 2
    assert scaling.measure("y", 0, torch.zeros(3), format="e4m3") == CastCounts(3)
    assert scaling.measure("y", 1, torch.ones(3), format="e4m3").scale_inv_max == 1.0


def test_input_is_left_alone():
    """The cast is of a copy, also where NaNs and infinities are left out."""
    x = spread(4, 64).double()
    x[0, 0], x[1, 5], x[2, 7] = math.nan, math.inf, -math.inf
    x.requires_grad_()
    before = x.detach().clone()
    for recipe in SIDES:
        measure_cast(x, recipe=recipe)
    measure_blockwise(x, block_size=7)
    assert torch.equal(x.detach().nan_to_num(7.0), before.nan_to_num(7.0))


def test_merge():
    """Counts of several tensors add up, each with its own scale, and cross the network as rows."""
    x, y = spread(3, 64), spread(2, 40) * 1000
    a, b = measure_cast(x), measure_cast(y)
    merged = a.merge(b)
    assert merged == b.merge(a) == CastCounts.from_row(merged.row())
    assert merged.merge(CastCounts.EMPTY) == merged
    assert (merged.scale_inv_min, merged.scale_inv_max) == (a.scale_inv_min, b.scale_inv_max)
    assert merged.nonzero_after == a.nonzero_after + b.nonzero_after


@pytest.mark.parametrize("name", [n for n, s in CAST_STATISTICS.items() if s.recipe in SIDES])
def test_statistics(name):
    """Names carry recipe, orientation and format; values follow from the counts."""
    x = spread(30, 70)
    bare = name.removesuffix("_e5m2")
    format = "e5m2" if name.endswith("_e5m2") else "e2m1" if name.startswith("nvfp4") else "e4m3"
    blocks = "columns" if bare.endswith("_columnwise") else "rows"
    bare = bare.removesuffix("_columnwise")
    recipe = next((recipe for recipe in SIDES if bare.startswith(f"{recipe}_")), "fp8_current_scaling")
    counts = reference(x, recipe, format, blocks)
    under = counts.nonzero - counts.nonzero_after
    expected = {
        "underflows%": 100 * under / x.numel(),
        "overflows%": 100 * counts.over / x.numel(),
        "underflows": under,
        "overflows": counts.over,
        "mse": counts.squared_error / x.numel(),
        "scale_inv_min": counts.scale_inv_min,
        "scale_inv_max": counts.scale_inv_max,
    }[bare.removeprefix(f"{recipe}_")]
    statistic = CAST_STATISTICS[name]
    assert (statistic.recipe, statistic.format, statistic.columnwise) == (recipe, format, blocks == "columns")
    found = measure_cast(x, recipe=recipe, format=format, blocks=blocks)
    assert statistic.formula(found) == pytest.approx(expected, rel=1e-9)


def test_names_of_statistics():
    """Recipes with one scale a tensor have no orientation; nvfp4 has one format."""
    assert {"fp8_delayed_scaling_overflows%", "mxfp8_scale_inv_min_columnwise", "nvfp4_mse"} <= set(CAST_STATISTICS)
    assert {"mxfp8_mse_columnwise_e5m2", "fp8_block_scaling_underflows%_columnwise"} <= set(CAST_STATISTICS)
    refused = {"fp8_current_scaling_mse_columnwise", "fp8_delayed_scaling_mse_columnwise", "nvfp4_mse_e5m2"}
    assert refused.isdisjoint(CAST_STATISTICS)


def test_statistics_of_nothing():
    """Without elements shares and scales are NaN, counts 0."""
    for name, statistic in CAST_STATISTICS.items():
        is_count = name.removesuffix("_e5m2").removesuffix("_columnwise").endswith("flows")
        value = statistic.formula(CastCounts.EMPTY)
        assert value == 0 if is_count else math.isnan(value)


def test_wrong_recipe():
    """Unknown recipes, formats, blocks and scales are refused with what there is."""
    for wrong in ({"recipe": "fp4"}, {"format": "e3m4"}, {"recipe": "nvfp4", "format": "e4m3"}, {"blocks": "cubes"}):
        with pytest.raises(ValueError, match="must be one of"):
            measure_cast(torch.ones(3), **wrong)
    for wrong in ({"recipe": "fp8_delayed_scaling"}, {"recipe": "mxfp8", "scale_inv": 1.0}):
        with pytest.raises(ValueError, match="is for fp8_delayed_scaling"):
            measure_cast(torch.ones(3), **wrong)
    with pytest.raises(ValueError, match="must be a positive number"):
        measure_cast(torch.ones(3), recipe="fp8_delayed_scaling", scale_inv=0.0)


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
    other = measure_blockwise(x.reshape(-1, shape[-1]).t().contiguous(), block_size=block_size, dims=dims)
    both = measure_blockwise(x, block_size=block_size, dims=dims, max_over_orientations=True)
    assert both.value == max(record.value, other.value)


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
