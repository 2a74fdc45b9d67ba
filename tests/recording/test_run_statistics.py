"""Statistics of a run: which models are found, and what is refused."""

import pytest
import torch
from torch import nn

from pipesight.recording import observe
from support.observed import STATS, attached, log_lines, pipeline, sgd, statistics, train


def test_plain_model_is_found(run):
    """The outermost module that is called in training is watched; losses and inner modules are not."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    loss, optimizer = nn.MSELoss(), sgd(model)
    with observe(run, stats=STATS):
        for _ in range(2):
            loss(model(torch.randn(8, 4)), torch.zeros(8, 2)).backward()
            optimizer.step()
    activations = {r["layer"] for r in statistics(run) if r["tensor"] == "activation"}
    assert activations == {"0", "1", "1.0", "1.1"}
    assert {r["iteration"] for r in statistics(run)} == {0, 1}


def test_pipeline_inside_a_module(run):
    """Of a module that holds a pipeline, the pipeline is watched."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.pipe, self.head = pipeline(), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(self.pipe(x))

    with observe(run, stats=STATS):
        train(Whole(), 1)
    assert {r["layer"] for r in statistics(run)} == {"0", "1", "2"}


def test_program_chooses_the_model(run):
    """A program that says which model is meant has no other watched."""
    one, other = nn.Sequential(nn.Linear(4, 2)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with observe(run, stats=STATS) as observation:
        observation.watch(other)
        train(one, 1)
        train(other, 1)
    assert {r["layer"] for r in statistics(run) if r["tensor"] == "activation"} == {"0", "1"}
    assert {r["iteration"] for r in statistics(run)} == {1}


def test_two_models_with_the_same_layer_names(run):
    """A second model with the same names of layers is not mixed up with the first; a line says so."""
    with observe(run, stats=STATS):
        train(nn.Sequential(nn.Linear(4, 2)), 1)
        train(nn.Sequential(nn.Linear(4, 2)), 1)
    assert {r["iteration"] for r in statistics(run)} == {0}
    assert any("run.watch(model)" in line for line in log_lines(run))


def test_mistake_in_the_configuration(run):
    """A configuration with a mistake is refused before anything is recorded, and nothing is left behind."""
    from pipesight.stats import ConfigError

    before = attached()
    with pytest.raises(ConfigError), observe(run, stats={"all": {"enabled": True}}):
        pytest.fail("went on")
    assert attached() == before
