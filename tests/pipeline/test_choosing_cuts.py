"""Cuts are chosen by what the modules of a model cost, among those that can be cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline
from pipesight.balance import cuts_by_size, cuts_by_time
from pipesight.pipeline import unit_timing


class Clock:
    """Time that passes where a model says so, and nowhere else: a machine with other work has no part in it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


clock = Clock()


@pytest.fixture(autouse=True)
def _made_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_timing, "time", clock)


class Slow(torch.autograd.Function):
    """The identity, which takes a while forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = backward
        clock.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        clock.sleep(ctx.seconds)
        return gradient * 1, None, None


class Block(nn.Module):
    def __init__(self, forward: float = 0.0, backward: float = 0.0, width: int = 4) -> None:
        super().__init__()
        self.costs = forward, backward
        self.layer, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Slow.apply(self.norm(self.layer(x)), *self.costs)
        return y


class Model(nn.Module):
    """Blocks between two layers; an activation that is called after each block; time spent outside all modules."""

    def __init__(self, blocks: list[Block], between: float = 0.0) -> None:
        super().__init__()
        self.first, self.act, self.drop = nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(blocks)
        self.head, self.between = nn.Linear(4, 3), between

    def forward(self, x: Tensor, *, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.drop(self.first(x))
        for k, block in enumerate(self.blocks):
            x = self.act(block(x))
            if k == 0:
                clock.sleep(self.between)
        scores = self.head(x)
        return {"scores": scores, "loss": None if labels is None else nn.functional.cross_entropy(scores, labels)}


SAMPLE = {"x": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.long)}
MS = 0.001


def test_by_forward_and_backward() -> None:
    """Both count, in modules and between them, where the time belongs to the module that was called before."""
    forward = Model([Block(20 * MS), *(Block() for _ in range(3)), Block(20 * MS)])
    assert cuts_by_time(forward, SAMPLE, 2, timeout=0) in (["blocks.1"], ["blocks.2"], ["blocks.3"], ["blocks.4"])
    backward = Model([Block(4 * MS, 2 * MS), Block(2 * MS, 4 * MS), Block(0, 30 * MS), Block(2 * MS, 4 * MS)])
    assert cuts_by_time(backward, SAMPLE, 3, timeout=0) == ["blocks.2", "blocks.3"]
    between = Model([Block(5 * MS), Block(5 * MS), Block(5 * MS), Block(5 * MS)], between=20 * MS)
    assert cuts_by_time(between, ((SAMPLE["x"],), {}), 2, timeout=0) == ["blocks.1"]


def test_by_size() -> None:
    """A block with larger parameters is in a partition with fewer others."""
    model = Model([Block(), Block(), Block()])
    model.blocks.append(nn.TransformerEncoderLayer(4, 1, dim_feedforward=2000))
    assert cuts_by_size(model, SAMPLE, 2) == ["blocks.3"]


def test_a_block_that_costs_too_much_is_opened() -> None:
    """A stage that is most of the model is cut inside."""
    stage = nn.Sequential(*(Block(10 * MS) for _ in range(4)))
    model = Model([Block()])
    model.blocks.append(stage)
    assert cuts_by_time(model, SAMPLE, 2, timeout=0) == ["blocks.1.2"]


def test_the_model_is_left_as_it_was() -> None:
    """Parameters, gradients, buffers, modes, hooks and random numbers are as before."""
    model = Model([Block(), Block()])
    model.blocks[0].eval()
    model(**SAMPLE)["loss"].backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [None if gradient is None else gradient.clone() for gradient in gradients]
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    cuts_by_time(model, SAMPLE, 2, timeout=0)
    cuts_by_size(model, SAMPLE, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    assert all(b is None or torch.equal(a, b) for a, b in zip(gradients, copies, strict=True) if a is not None)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_pipeline_chooses() -> None:
    """A pipeline of so many partitions cuts itself, and learns as the model does."""
    model = Model([Block(4 * MS), Block(4 * MS), Block(4 * MS), Block(4 * MS)])
    model.blocks[3].spare = nn.Parameter(torch.zeros(9999))
    settings: Any = {"partitions": 2, "sample": SAMPLE, "devices": ["cpu"] * 2, "chunks": 2}
    pipe = Pipeline(model, **settings)
    assert pipe.cuts == ["blocks.2"]
    assert Pipeline(model, **settings, equal="memory").cuts == ["blocks.3"]
    pipe(**SAMPLE)["loss"].backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "spare" not in name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partitions": 2}, r"together"),
        ({"sample": SAMPLE}, r"together"),
        ({"partitions": 2, "sample": SAMPLE, "cuts": ["head"]}, r"without cuts"),
        ({"partitions": 2, "sample": SAMPLE["x"]}, r"\(args, kwargs\).*Tensor"),
        ({"partitions": 2, "sample": SAMPLE, "equal": "size"}, r"'time' or 'memory'.*'size'"),
        ({"partitions": 0, "sample": SAMPLE}, r"partitions: 0"),
        ({"partitions": 9, "sample": SAMPLE}, r"Model has too few modules.*drop, blocks.0, blocks.1, head"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    """Errors name what is missing."""
    with pytest.raises((TypeError, ValueError), match=words):
        Pipeline(Model([Block(), Block()]), **settings)


def test_an_error_of_the_model_tells_what_it_got() -> None:
    class Weighed(nn.Sequential):  # by two numbers for each sample
        def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            scale = float(x.mean())  # what has no values cannot run this
            return torch.stack([y[k] * pair.sum() for k, pair in enumerate(weights.split(2))]) * scale

    model = Weighed(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(IndexError) as caught:
        Pipeline(model, partitions=2, sample=((torch.ones(4, 2), torch.ones(8)), {}), chunks=2)
    assert "batch_dim={'weights': 0} cuts it" in caught.value.__notes__[-1]
