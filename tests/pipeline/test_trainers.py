"""Trainers of other packages around a pipeline: the losses are those of the plain model with the same trainer."""

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
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}])
def test_transformers(tmp_path, more):
    settings = {"max_grad_norm": 0.5, **more}
    plain = model()
    expected, plainly = losses_of_transformers(plain, tmp_path / "plain", **settings)
    ours = model()
    found, trainer = losses_of_transformers(Pipeline(ours, CUTS, chunks=3), tmp_path / "ours", **settings)
    assert len(expected) == STEPS
    assert expected[0] != expected[-1]
    assert found == pytest.approx(expected, rel=1e-4)  # Trainer rounds what it logs
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    evaluated = plainly.evaluate(lines())["eval_loss"]
    assert trainer.evaluate(lines())["eval_loss"] == pytest.approx(evaluated, rel=1e-4)


def test_accelerate():
    pytest.importorskip("accelerate", reason="needs accelerate")
    expected, theirs = train_with_accelerate(model())
    found, ours = train_with_accelerate(Pipeline(model(), CUTS, chunks=3))
    assert found == pytest.approx(expected, rel=1e-5)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(lightning_name() is None, reason="needs lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    expected = train_with_lightning(model(), tmp_path)
    found = train_with_lightning(Pipeline(model(), CUTS, chunks=3), tmp_path)
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
