"""Trainers of other packages around a pipeline on a GPU, to which they move it. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from pipesight import Pipeline

pytest.importorskip("transformers", reason="needs transformers")

from support.trainers import (
    CUTS,
    STEPS,
    lightning_name,
    lines,
    losses_of_transformers,
    model,
    train_with_accelerate,
    train_with_lightning,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cuda:0"] * 3], ids=["moved", "there"])
def test_transformers(tmp_path, devices):
    expected, plainly = losses_of_transformers(model(), tmp_path / "plain", "cuda")
    pipe = Pipeline(model(), CUTS, devices=devices, chunks=3)
    found, trainer = losses_of_transformers(pipe, tmp_path / "ours", "cuda")
    assert {str(device) for device in pipe.devices} == {"cuda:0"}
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-3)
    evaluated = plainly.evaluate(lines())["eval_loss"]
    assert trainer.evaluate(lines())["eval_loss"] == pytest.approx(evaluated, rel=1e-3)


def test_accelerate():
    expected, theirs = train_with_accelerate(model(), "cuda")
    found, ours = train_with_accelerate(Pipeline(model(), CUTS, devices=["cpu"] * 3, chunks=3), "cuda")
    assert found == pytest.approx(expected, rel=1e-4)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].device == tensor.device
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(lightning_name() is None, reason="needs lightning")
def test_lightning(tmp_path):
    expected = train_with_lightning(model(), tmp_path, "cuda")
    found = train_with_lightning(Pipeline(model(), CUTS, devices=["cpu"] * 3, chunks=3), tmp_path, "cuda")
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-4)
