"""The losses of a step are weighed before all are known; what cannot be weighed so is refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesight import Pipeline
from pipesight.pipeline.step_losses import StepLosses

_F = nn.functional


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def data(samples: int = 7) -> tuple[Tensor, Tensor]:
    """Return inputs, and classes of which the first micro-batch has the fewest that count."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(4, (samples, 5), generator=generator)
    counted = torch.rand(samples, 5, generator=generator) < torch.linspace(0.2, 1, samples)[:, None]
    return torch.randn(samples, 5, 6, generator=generator).double(), classes.masked_fill(~counted, -100)


def tokens(output: Tensor, target: Tensor) -> Tensor:
    return _F.cross_entropy(output.flatten(0, 1), target.flatten())


def masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).double()
    return (output.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return _F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.unsqueeze(-1)).square().mean()


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    kept = target != -100
    return -output.log_softmax(-1)[kept].gather(1, target[kept].unsqueeze(1)).mean()


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return _F.cross_entropy(output.flatten(0, 1), target.flatten(), weight=torch.tensor([1.0, 2.0, 0.5, 3.0]).double())


def step(loss_fn: Any, batch: tuple[Tensor, Tensor], **settings: Any) -> tuple[Tensor, list[Tensor | None]]:
    pipe = Pipeline(model(), ["2"], loss_fn=loss_fn, **{"chunks": 4, **settings})
    loss = pipe.step(*batch)
    return loss, [p.grad for p in pipe.parameters()]


def truth(loss_fn: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    plain = model()
    loss = loss_fn(plain(batch[0]), batch[1])
    loss.backward()
    return loss.detach(), [p.grad for p in plain.parameters()]


@pytest.mark.parametrize("loss_fn", [tokens, masked, summed, squares, by_hand, weighted])
@pytest.mark.filterwarnings("error")
def test_losses_are_weighed_by_what_they_are_means_over(loss_fn: Any) -> None:
    torch.testing.assert_close(step(loss_fn, data()), truth(loss_fn, data()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_fn", [tokens, masked, weighted])
@pytest.mark.parametrize("empty", [slice(0, 2), slice(4, 6), slice(0, 4)])
def test_micro_batches_in_which_nothing_counts(loss_fn: Any, empty: slice) -> None:
    x, y = data()
    y[empty] = -100
    torch.testing.assert_close(step(loss_fn, (x, y)), truth(loss_fn, (x, y)), rtol=1e-9, atol=1e-12)


def test_a_batch_in_which_nothing_counts() -> None:
    x, y = data()
    loss, gradients = step(tokens, (x, torch.full_like(y, -100)))
    assert loss.isnan()
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("empty", [slice(0, 0), slice(0, 2), slice(4, 6), slice(0, 7)])
def test_weights_that_are_not_read_from_a_gpu(monkeypatch: pytest.MonkeyPatch, empty: slice) -> None:
    monkeypatch.setattr(StepLosses, "_are_there", lambda losses: all(map(torch.is_tensor, losses._guesses)))
    monkeypatch.setattr(StepLosses, "_shares", None)  # which needs the numbers
    x, y = data()
    y[empty] = -100
    found, wanted = step(tokens, (x, y)), truth(tokens, (x, y))
    gradients = [None if g is None else g.nan_to_num() for g in wanted[1]]  # the mean of nothing has none here
    torch.testing.assert_close(found, (wanted[0], gradients), rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.filterwarnings("ignore:chunks is 4, but")
@pytest.mark.parametrize("samples", [2, 3, 5])
def test_batches_of_any_size(samples: int) -> None:
    torch.testing.assert_close(step(tokens, data(samples)), truth(tokens, data(samples)), rtol=1e-9, atol=1e-12)


def test_classes_that_count_up_by_accident() -> None:
    """A micro-batch whose classes are 0, 1, ..., as if samples were told from each other, is weighed as others are."""
    batch = torch.randn(7, 6).double(), torch.tensor([0, 1, 2, 3, 2, 0, 1])
    loss = step(_F.cross_entropy, batch, chunks=2)
    torch.testing.assert_close(loss, truth(_F.cross_entropy, batch), rtol=1e-9, atol=1e-12)


def test_a_loss_that_is_a_module_and_a_sum() -> None:
    loss_fn = nn.MSELoss(reduction="sum")
    batch = data()[0], data()[0][..., :4]
    torch.testing.assert_close(step(loss_fn, batch), truth(loss_fn, batch), rtol=1e-9, atol=1e-12)


def norm(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.unsqueeze(-1)).square().mean().sqrt()


def two_means(output: Tensor, target: Tensor) -> Tensor:
    return tokens(output, target) + output.square().mean()


def contrast(output: Tensor, target: Tensor) -> Tensor:
    scores = output.mean(1) @ output.mean(1).T
    return _F.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize(("loss_fn", "chunks"), [(norm, 4), (two_means, 4), (contrast, 4), (contrast, 7)])
def test_a_loss_that_micro_batches_do_not_add_up_to_is_refused(loss_fn: Any, chunks: int) -> None:
    pipe = Pipeline(model(), ["2"], chunks=chunks, loss_fn=loss_fn)
    with pytest.raises(ValueError, match="loss_weight='samples'"):
        pipe.step(*data())
    assert all(p.grad is None for p in pipe.parameters())
    loss, _ = step(loss_fn, data(), loss_weight="samples")
    x, y = data()
    with torch.no_grad():
        parts = [loss_fn(model()(a), b) * len(a) / 7 for a, b in zip(x.split(2), y.split(2), strict=True)]
    torch.testing.assert_close(loss, torch.stack(parts).sum())


def test_weights_of_the_user() -> None:
    def count(output: Tensor, target: Tensor) -> Tensor:
        assert output.shape[:2] == target.shape
        assert output.is_meta
        return (target != -100).sum()

    found = step(two_means, data(), loss_weight=count)
    x, y = data()
    total = (y != -100).sum()
    plain = model()
    for a, b in zip(x.split(2), y.split(2), strict=True):
        (two_means(plain(a), b) * (b != -100).sum() / total).backward()
    torch.testing.assert_close(found[1], [p.grad for p in plain.parameters()], rtol=1e-9, atol=1e-12)
    with pytest.raises(TypeError, match="loss_weight depends on the values of the output") as caught:
        step(tokens, data(), loss_weight=lambda output, target: output.sum())
    assert any("an output that has a shape but no values" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="non-negative number, but returned -1"):
        step(tokens, data(), loss_weight=lambda output, target: -1)


class Own(nn.Module):
    """Computes its loss itself."""

    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        self.layers, self.loss_fn = model(), loss_fn

    def forward(self, x: Tensor, y: Tensor, items: Tensor | None = None) -> Any:
        loss = self.loss_fn(self.layers(x), y)
        return loss if items is None else {"loss": loss / items}


def test_a_model_that_divides_by_a_number_that_it_is_given() -> None:
    x, y = data()
    items = (y != -100).sum()
    plain = Own(summed)
    pipe = Pipeline(copy.deepcopy(plain), ["layers.2"], chunks=4)
    loss = plain(x, y, items)["loss"]
    loss.backward()
    torch.testing.assert_close(pipe.step(x, y, items=items), loss.detach())
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


def test_a_model_with_a_part_that_cannot_be_weighed_warns_as_a_call_does() -> None:
    def with_root(output: Tensor, target: Tensor) -> Tensor:
        return tokens(output, target) + norm(output, target.clamp(min=0))

    x, y = data()
    found = []
    for way in ("call", "step"):
        pipe = Pipeline(Own(with_root), ["layers.2"], chunks=4)
        with pytest.warns(RuntimeWarning, match="has a part that is no mean over samples"):
            loss = pipe(x, y) if way == "call" else pipe.step(x, y)
        if way == "call":
            loss.backward()
        found.append((loss.detach(), [p.grad for p in pipe.parameters()]))
    torch.testing.assert_close(found[1], found[0])


def test_weights_by_the_arguments_of_the_model() -> None:
    x, y = data()
    pipe = Pipeline(Own(two_means), ["layers.2"], chunks=4, loss_weight=lambda x, y: (y != -100).sum())
    same = Pipeline(Own(two_means), ["layers.2"], chunks=4, loss_weight=lambda x, y: (y != -100).sum())
    loss = pipe(x, y)
    loss.backward()
    torch.testing.assert_close(same.step(x, y), loss.detach())
    torch.testing.assert_close([p.grad for p in same.parameters()], [p.grad for p in pipe.parameters()])


def test_a_loss_that_is_taken_of_the_output() -> None:
    x, y = data()
    plain = Own(tokens)
    pipe = Pipeline(copy.deepcopy(plain), ["layers.2"], chunks=4, loss=lambda output: output * 3)
    (plain(x, y) * 3).backward()
    torch.testing.assert_close(pipe.step(x, y), plain(x, y).detach() * 3)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


def test_a_target_that_cannot_be_cut_is_refused() -> None:
    x, y = data()
    pipe = Pipeline(
        model(), ["2"], chunks=4, loss_fn=lambda output, target: tokens(output, target.unflatten(0, (-1, 5)))
    )
    with pytest.raises(ValueError, match=r"the target must have as many samples as the input.*target: \[35\]"):
        pipe.step(x, y.flatten())
    weights = torch.rand(4).double()
    shared = Pipeline(model(), ["2"], chunks=4, loss_fn=lambda o, t: (o * t).mean(), batch_dim={"target": None})
    loss = (model()(x) * weights).mean()
    torch.testing.assert_close(shared.step(x, weights), loss.detach())


def test_constructors_that_are_refused() -> None:
    with pytest.raises(TypeError, match="give either loss, which takes the model's output, or loss_fn"):
        Pipeline(model(), ["2"], loss=lambda output: output, loss_fn=tokens)
    with pytest.raises(TypeError, match="loss_fn must be a function of output and target, but got str"):
        Pipeline(model(), ["2"], loss_fn="mse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_fn must have no parameters"):
        Pipeline(model(), ["2"], loss_fn=nn.Bilinear(1, 1, 1))
    with pytest.raises(TypeError, match="loss_fn must return one number, as a tensor, but returned a tensor of shape"):
        Pipeline(model(), ["2"], loss_fn=lambda output, target: output).step(*data())


def test_scores_of_a_loss_without_a_mean_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(tokens, data(4))
