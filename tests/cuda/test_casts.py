"""Casts to float8 and float4 on a GPU do what they do on the CPU."""

import pytest
import torch

from pipesight.stats.moments.cast_statistics import RECIPES
from pipesight.stats.moments.casting import measure_cast

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", ["rows", "columns", "squares"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_as_on_the_cpu(recipe: str, blocks: str, dtype: torch.dtype) -> None:
    """Counts are the same, errors and scales too but for the order of a sum."""
    torch.manual_seed(0)
    x = (torch.randn(300, 500) * 10 ** (torch.rand(300, 500) * 9 - 9)).to(dtype)
    scale = {"scale_inv": 0.01} if recipe == "fp8_delayed_scaling" else {}
    for format in RECIPES[recipe].formats:
        here = measure_cast(x, recipe=recipe, format=format, blocks=blocks, **scale)
        there = measure_cast(x.cuda(), recipe=recipe, format=format, blocks=blocks, **scale)
        assert there.row()[:4] == here.row()[:4]
        assert there.row()[4:] == pytest.approx(here.row()[4:], rel=1e-12)
