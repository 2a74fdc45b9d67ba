"""The features of Transformer Engine's namespace log what its recipes would do, by the names that it has for them."""

from __future__ import annotations

import json

import pytest
import torch

from pipesight.stats.api import open_session


def logged(folder, features, calls):
    """Log tensors, given as step, tensor name and tensor; return values by step, tensor name and statistic."""
    section = {"enabled": True, "layers": {"layer_types": ["fc"]}, "transformer_engine": features}
    session = open_session({"casts": section}, log_dir=folder)
    for step, name, tensor in calls:
        session.log_tensor_stats("fc1", tensor, name, iteration=step)
    session.close()
    lines = map(json.loads, (folder / "stats" / "rank-00000.jsonl").read_text().splitlines())
    return {(line["iteration"], line["tensor"], line["statistic"]): line["value"] for line in lines}


def feature(*stats, tensors="all"):
    return {"enabled": True, "tensors": tensors, "stats": list(stats)}


def test_names(tmp_path):
    """Statistics of NVFP4 carry their recipe, so that those of float8 of the same name stay apart."""
    features = {
        "LogFp8TensorStats": feature("underflows%", "mxfp8_mse_columnwise"),
        "LogNvfp4TensorStats": feature("underflows%", "mse"),
    }
    x = torch.tensor([[6.0, 0.3, 0.2] + [0.0] * 13])  # 0.3 becomes 0.5, 0.2 becomes 0 in float4, and neither in float8
    found = logged(tmp_path, features, [(0, "activation", x)])
    assert found == {
        (0, "activation", "underflows%"): 0.0,
        (0, "activation", "mxfp8_mse_columnwise"): pytest.approx(0.0, abs=1e-4),
        (0, "activation", "nvfp4_underflows%"): pytest.approx(100 / 16),
        (0, "activation", "nvfp4_mse"): pytest.approx((0.2**2 + 0.2**2) / 16),
    }


def test_delayed_scaling(tmp_path):
    """The scale of a step is that of the step before, for each tensor; micro-batches of a step share it."""
    stats = ("fp8_delayed_scaling_scale_inv_max", "fp8_delayed_scaling_overflows%")
    calls = [(step, name, torch.full((4,), 448.0 * size)) for step, size in enumerate([1, 2, 8]) for name in "ab"]
    calls += [(3, "a", torch.tensor([448.0 * 16])), (3, "a", torch.tensor([1.0, 448.0 * 8, 1.0]))]
    found = logged(tmp_path, {"LogFp8TensorStats": feature(*stats)}, calls)
    scales = {(step, name): value for (step, name, statistic), value in found.items() if "scale" in statistic}
    assert scales == {(s, n): v for s, v in enumerate([1.0, 1.0, 2.0]) for n in "ab"} | {(3, "a"): 8.0}
    assert [found[step, "a", stats[1]] for step in range(4)] == [0.0, 100.0, 100.0, 25.0]


def test_weights_have_square_blocks(tmp_path):
    """Blocks of weights are squares where the recipe has it so; those of other tensors are parts of a row."""
    x = torch.ones(256, 256)
    x[0] = 448.0
    stats = ("fp8_block_scaling_scale_inv_min", "mxfp8_scale_inv_min")
    found = logged(tmp_path, {"LogFp8TensorStats": feature(*stats)}, [(0, "weight", x), (0, "gradient", x)])
    assert found[0, "gradient", stats[0]] == found[0, "gradient", stats[1]] == 2.0**-8
    assert found[0, "weight", stats[1]] == 2.0**-8
    x[128] = 448.0
    assert logged(tmp_path, {"LogFp8TensorStats": feature(stats[0])}, [(0, "weight", x)])[0, "weight", stats[0]] == 1.0


def test_ranges_of_blocks_both_ways(tmp_path):
    """Activations and weights are cast both ways, so the worse range counts; gradients are not."""
    x = torch.ones(32, 32)
    x[0] = 8.0  # rows span nothing, columns three powers of two
    found = logged(
        tmp_path,
        {"LogTensorStats": feature({"max_blockwise_dynamic_range": {"block_size": 32}})},
        [(0, "activation", x), (0, "gradient", x), (0, "weight", x)],
    )
    name = "max_blockwise_dynamic_range_block_size_32_dims_1"
    assert found == {
        (0, "activation", f"{name}_max_over_orientations"): 3.0,
        (0, "gradient", name): 0.0,
        (0, "weight", f"{name}_max_over_orientations"): 3.0,
    }
