"""A `Pipeline` returns what the model returns for the whole batch: its classes, its cache, its loss."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline


class Model(nn.Module):
    """Two lists of blocks in modules that are opened, a cache, and a loss that ignores labels of -100."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
        self.two = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))

    def forward(self, x: Tensor, labels: Tensor | None = None, cache: Any = None) -> types.SimpleNamespace:
        scores = self.two(self.one(x))
        if cache is not None:
            cache.seen = x if cache.seen is None else torch.cat([cache.seen, x], 1)
        loss = None if labels is None else nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels.flatten())
        return types.SimpleNamespace(loss=loss, scores=scores, cache=cache)


def make() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(samples: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(4, (samples, 5), generator=generator)
    lengths = torch.arange(samples) % 4 + 1
    return torch.randn(samples, 6, 4, dtype=torch.float64, generator=generator), torch.where(
        torch.arange(5) < lengths[:, None], labels, -100
    )


def pipe_of(model: nn.Module, **settings: Any) -> Pipeline:
    return Pipeline(model, ["two"], devices=["cpu"] * 2, chunks=3, **settings)


def test_loss_of_padded_labels() -> None:
    """Loss and gradients are those of the whole batch, though micro-batches have different numbers of labels."""
    plain, model = make(), make()
    x, labels = batch()
    truth, output = plain(x, labels).loss, pipe_of(model)(x, labels=labels)
    torch.testing.assert_close(output.loss, truth)
    truth.backward()
    output.loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_loss_without_gradients() -> None:
    """So it is without gradients, at every call."""
    model = make()
    pipe = pipe_of(model).eval()
    x, labels = batch()
    with torch.no_grad():
        assert pipe(x).loss is None
        for _ in range(2):
            torch.testing.assert_close(pipe(x, labels).loss, model(x, labels).loss)
        assert pipe(x).loss is None


def test_loss_weight() -> None:
    """The user says how losses are weighed; a function is called as the model is."""
    model = make()
    x, labels = batch()
    parts = [model(x[i : i + 2], labels[i : i + 2]).loss for i in (0, 2, 4)]
    torch.testing.assert_close(pipe_of(model, loss_weight="sum")(x, labels).loss, sum(parts))
    by_samples = 0.4 * parts[0] + 0.4 * parts[1] + 0.2 * parts[2]
    torch.testing.assert_close(pipe_of(model, loss_weight="samples")(x, labels).loss, by_samples)

    def weight(x: Tensor, *, labels: Tensor) -> int:
        assert len(x) == len(labels)
        return int(len(x) == 1)

    torch.testing.assert_close(pipe_of(model, loss_weight=weight)(x, labels=labels).loss, parts[2])
    with pytest.raises(ValueError, match=r"loss_weight.*'average'"):
        pipe_of(model, loss_weight="average")


def test_a_cache_is_filled() -> None:
    """The caller's cache holds what it would hold with the plain model."""
    pipe, cache, truth = pipe_of(make()), types.SimpleNamespace(seen=None), types.SimpleNamespace(seen=None)
    x, _ = batch()
    with torch.no_grad():
        for step in range(3):
            assert pipe(x + step, cache=cache).cache is cache
            pipe.module(x + step, cache=truth)
    torch.testing.assert_close(cache.seen, truth.seen)


def test_several_pipelines_of_one_model() -> None:
    """A model may be in several pipelines that are cut at the same module, and a copy of it in another."""
    model, (x, _) = make(), batch()
    pipes = [pipe_of(model), pipe_of(model), pipe_of(copy.deepcopy(model))]
    for pipe in pipes:
        torch.testing.assert_close(pipe(x).scores, model(x).scores)
