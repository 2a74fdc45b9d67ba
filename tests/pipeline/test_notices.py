"""A pipeline that trains tells once of a batch that is too small, and of copies that other ranks train."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from pipesight import Pipeline


def make(**settings) -> Pipeline:
    return Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["1"], loss=lambda y: y.mean(), **settings)


def run(pipe: Pipeline, how: str, samples: int) -> list[str]:
    """Return what a mini-batch warns of, at this line of the program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(torch.ones(samples, 2)) if how == "step" else pipe(torch.ones(samples, 2))
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("how", ["step", "call"])
def test_a_batch_smaller_than_chunks(how):
    """The first one is told, with what to do; the last one of an epoch, and one that is not trained, are not."""
    pipe = make(chunks=4)
    (message,) = run(pipe, how, 3)
    assert message.startswith("chunks is 4, but the batch has only 3 samples")
    assert message.endswith("or chunks=3")
    assert not run(pipe, how, 2)
    pipe = make(chunks=4)
    assert not run(pipe.eval(), "call", 1)
    assert not run(pipe.train(), how, 4)
    assert not run(pipe, how, 1)


@pytest.mark.parametrize("how", ["step", "call"])
def test_copies_on_other_ranks(monkeypatch, how):
    """One rank tells it, unless DDP calls the pipeline or FSDP shards it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert not run(make(), how, 3)
    monkeypatch.setenv("RANK", "0")
    pipe = make()
    (message,) = run(pipe, how, 3)
    assert message.startswith("2 processes train a copy of the model each")
    assert "DistributedPipeline" in message
    assert not run(pipe, how, 3)
    pipe = make()
    pipe._is_fsdp_managed_module = True  # as `fully_shard` leaves it
    assert not run(pipe, how, 3)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", nn.Identity())
    assert not run(make(), how, 3)
