"""The losses of micro-batches give the loss and the gradients of the whole batch, whatever they are means over."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipesight.pipeline.calls import split_call
from pipesight.pipeline.loss_merging import LossMerging
from pipesight.pipeline.loss_watch import LossWatch
from pipesight.pipeline.outputs import Merge, flatten_output
from support.against_plain import rand

F = nn.functional
CLASSES = 5


class Model(nn.Module):
    """A layer and a loss: a function of scores, labels and the model."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(3, CLASSES, dtype=torch.float64), loss
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        with torch.no_grad():
            self.layer.weight.copy_(rand(CLASSES, 3))
            self.layer.bias.copy_(rand(CLASSES))

    def forward(self, x, labels, **more):
        scores = self.layer(x)
        return {"loss": self.loss(self, scores, labels, **more), "scores": scores}


def flat(loss, **settings):
    return lambda model, scores, labels: loss(scores.flatten(0, 1), labels.flatten(), **settings)


def shifted(model, scores, labels):
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def smoothed(model, scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def masked(model, scores, labels):
    mask = (labels >= 0).double()
    return (scores.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1e-9)


def selected(model, scores, labels):
    return scores.square()[labels >= 0].mean()


def two(model, scores, labels):
    return 0.5 * smoothed(model, scores, labels) + flat(F.cross_entropy)(model, scores, labels) / 4


def penalty(model, scores, labels):
    return shifted(model, scores, labels) + 0.1 * model.layer.weight.square().sum() + model.scale


def images(model, scores, labels):
    return F.cross_entropy(scores.transpose(1, 2), labels)


def stacked(model, scores, labels):
    return torch.stack([images(model, scores, labels), selected(model, scores, labels) / CLASSES]).mean()


def words_and_sentences(model, scores, labels):
    """Return a loss over labels, and one over samples, as models of text have that learn both."""
    sentences = F.cross_entropy(scores.mean(1), labels.clamp(min=0)[:, 0] % 2)
    both = torch.add(sentences, F.cross_entropy(scores[:, 0], labels[:, 0]), alpha=2)
    return shifted(model, scores, labels) - 3 * both / 2


LOSSES = {
    "words and sentences": words_and_sentences,
    "cross entropy": flat(F.cross_entropy),
    "weighted": flat(F.cross_entropy, weight=rand(CLASSES).abs()),
    "sum": flat(F.cross_entropy, reduction="sum"),
    "nll": lambda model, scores, labels: F.nll_loss(scores.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "2d": images,
    "shifted": shifted,
    "smoothed": smoothed,
    "masked": masked,
    "selected": selected,
    "two": two,
    "penalty": penalty,
    "stacked": stacked,
    "mse": lambda model, scores, labels: F.mse_loss(scores, torch.ones_like(scores)),
    "l1": lambda model, scores, labels: F.l1_loss(scores, torch.zeros_like(scores)) * 2,
    "bce": lambda model, scores, labels: F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)),
    "mean of sums": lambda model, scores, labels: scores.square().sum((1, 2)).mean(),
    "means of means": lambda model, scores, labels: scores.square().mean(0).mean(0).mean(),
    "sum over samples": lambda model, scores, labels: scores.square().sum() / len(scores),
    "squares": lambda model, scores, labels: scores.square().sum(),
    "probabilities": lambda model, scores, labels: F.cross_entropy(
        scores.flatten(0, 1), torch.full((labels.numel(), CLASSES), 1 / CLASSES, dtype=torch.float64)
    ),
}
WITHOUT_GRAPH = LOSSES.keys() - {"masked", "penalty"}  # what they divide by, and what weights are, only a graph says


def pipelined(model, merging, x, labels, chunks, *, grad=True, **more):
    """Call a model micro-batch by micro-batch."""
    call = split_call((x, labels), more, chunks, {1: 0})  # which may have as many samples as steps
    watches = [LossWatch() for _ in call.calls]
    outputs = []
    for (args, kwargs), watch in zip(call.calls, watches, strict=True):
        if grad:
            outputs.append(model(*args, **kwargs))
        else:
            with torch.no_grad(), watch:
                outputs.append(model(*args, **kwargs))
    flats = [flatten_output(output, call.dims) for output in outputs]
    merge = Merge(flats, call, merging.weigher(call, () if grad else watches))
    return merge.rebuild([merge.join(k, [flat.tensors[k] for flat in flats]) for k in range(merge.count)])


def batch(n, ignored):
    """Return inputs and labels, some of them ignored, as a seed says."""
    generator = torch.Generator().manual_seed(ignored)
    labels = torch.randint(0, CLASSES, (n, 4), generator=generator)
    share = torch.rand((), generator=generator)
    labels[torch.rand(n, 4, generator=generator) < share] = -100
    labels[0, :3] = 1  # not all
    return rand(n, 4, 3), labels


@pytest.mark.parametrize("kind", LOSSES)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_loss_of_the_batch(kind, n, chunks, ignored):
    """Loss and gradients are those of the plain model on the whole batch, with uneven and padded micro-batches."""
    model = Model(LOSSES[kind])
    x, labels = batch(n, ignored)
    truth = model(x, labels)["loss"]
    expected = torch.autograd.grad(truth, model.parameters(), allow_unused=True)
    merging = LossMerging()
    if kind == "masked":  # known not to be a constant
        merging._ratios.add("output.loss")
    loss = pipelined(model, merging, x, labels, chunks)["loss"]
    torch.testing.assert_close(loss, truth)
    for mine, theirs in zip(torch.autograd.grad(loss, model.parameters(), allow_unused=True), expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", sorted(WITHOUT_GRAPH))
@settings(max_examples=15)
@given(st.integers(2, 9), st.integers(2, 5), st.integers(0, 99))
def test_without_gradients(kind, mode, n, chunks, ignored):
    """So it is without gradients."""
    model = Model(LOSSES[kind])
    x, labels = batch(n, ignored)
    with mode():
        loss = pipelined(model, LossMerging(), x, labels, chunks, grad=False)["loss"]
    assert not loss.requires_grad
    torch.testing.assert_close(loss, model(x, labels)["loss"].detach())


def by_items(model, scores, labels, num_items_in_batch=None):
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize("items", [37, 37.0, torch.tensor(37)])
def test_a_number_of_items_that_the_caller_passes(items):
    """Losses that are divided by a number that the caller passes, that of a larger batch, are added."""
    model = Model(by_items)
    x, labels = batch(5, 1)
    truth = model(x, labels, num_items_in_batch=items)["loss"]
    torch.testing.assert_close(pipelined(model, LossMerging(), x, labels, 2, num_items_in_batch=items)["loss"], truth)
    found = pipelined(model, LossMerging(), x, labels, 2, num_items_in_batch=items, grad=False)["loss"]
    torch.testing.assert_close(found, truth.detach())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, scores, labels: scores.square().mean().sqrt(), r"'output.loss' has a part.*Sqrt.*loss_weight"),
        (lambda model, s, labels: F.cross_entropy(s[:, 0] @ s[:, 1].T, torch.arange(len(s))), r"with each other"),
        (lambda m, s, labels: images(m, s, labels) + s.square().mean(), r"different numbers of items"),
        (lambda m, s, labels: s.square().mean() + s.square().sum(), r"adds a sum to other parts"),
        (lambda m, s, labels: s.mean() * m.scale, r"has a part.*Mul"),
        (lambda m, s, labels: (s.square().mean((0, 1)) * s.mean((0, 1))).sum(), r"has a part.*Sum"),
        (lambda m, s, labels: s.mean() if len(s) > 2 else s.sum(), r"computed differently"),
        (lambda m, s, labels: s.mean().detach(), r"no graph"),
    ],
)
def test_losses_that_are_no_means(loss, words):
    """A loss that micro-batches cannot give is averaged by samples, with one warning that says why."""
    model = Model(loss)
    x, labels = rand(5, 4, 3), torch.randint(0, CLASSES, (5, 4), generator=torch.Generator().manual_seed(0))
    labels[:3, 1:] = -100
    merging = LossMerging()
    with pytest.warns(RuntimeWarning, match=words):
        found = pipelined(model, merging, x, labels, 2)["loss"]
    parts = [model(x[:3], labels[:3])["loss"], model(x[3:], labels[3:])["loss"]]
    torch.testing.assert_close(found, parts[0] * 0.6 + parts[1] * 0.4)
    pipelined(model, merging, x, labels, 2)  # once
    quiet = pipelined(model, LossMerging("samples"), x, labels, 2)["loss"]
    assert torch.equal(quiet, found)


def test_a_divisor_that_may_be_a_constant():
    """A sum that is divided by the same number in all micro-batches is refused, until it was seen to differ."""
    model = Model(masked)
    x, labels = rand(4, 4, 3), torch.zeros(4, 4, dtype=torch.long)
    labels[:, 1:] = -100
    merging = LossMerging()
    few = labels.clone()
    few[:, 1] = 0
    with pytest.raises(ValueError, match=r"'output.loss'.*loss_weight='samples'.*'sum'"):
        pipelined(Model(lambda model, scores, labels: scores.square().sum() / 37), merging, x, labels, 2)
    few[0, 2] = 0
    pipelined(model, merging, x, few, 2)
    few[0, 2] = -100
    torch.testing.assert_close(pipelined(model, merging, x, few, 2)["loss"], model(x, few)["loss"])


def test_micro_batches_of_weight_0():
    """A micro-batch whose labels are all ignored has a loss of NaN, which does not count."""
    model = Model(flat(F.cross_entropy))
    x, labels = batch(6, 3)
    labels[2:4] = -100
    loss = pipelined(model, LossMerging(), x, labels, 3)["loss"]
    torch.testing.assert_close(loss, model(x, labels)["loss"])
    labels[:] = -100
    assert pipelined(model, LossMerging(), x, labels, 3)["loss"].isnan()


def test_a_divisor_that_is_kept_from_0():
    """A micro-batch without items, whose loss is 0 divided by 1, does not count, with a warning."""
    model = Model(lambda model, s, labels: (s[..., 0] * (labels >= 0)).sum() / (labels >= 0).sum().clamp(min=1))
    x, labels = batch(6, 3)
    labels[2:4] = -100
    with pytest.warns(RuntimeWarning, match=r"no items"):
        loss = pipelined(model, LossMerging(), x, labels, 3)["loss"]
    torch.testing.assert_close(loss, model(x, labels)["loss"])


def test_weights_that_the_user_gives():
    """A function of the arguments gives what the loss is a mean over; ``sum`` adds."""
    model = Model(lambda model, scores, labels: images(model, scores, labels).exp().log() ** 1)
    x, labels = batch(5, 2)
    counts = LossMerging(lambda x, labels: (labels != -100).sum())
    torch.testing.assert_close(pipelined(model, counts, x, labels, 2)["loss"], model(x, labels)["loss"])
    parts = [model(x[:3], labels[:3])["loss"], model(x[3:], labels[3:])["loss"]]
    torch.testing.assert_close(pipelined(model, LossMerging("sum"), x, labels, 2)["loss"], sum(parts))
    with pytest.raises(ValueError, match=r"finite, non-negative.*-1"):
        pipelined(model, LossMerging(lambda x, labels: -1), x, labels, 2)
    with pytest.raises(TypeError) as error:
        pipelined(model, LossMerging(lambda x: 1), x, labels, 2)
    assert "in loss_weight" in error.value.__notes__[0]
    with pytest.raises(ValueError, match=r"'samples', 'sum' or a function of the model's arguments, but got 'mean'"):
        LossMerging("mean")


def test_no_warning_of_equal_losses():
    """A scalar that is the same tensor in all micro-batches, such as a parameter, is itself."""
    model = Model(lambda model, scores, labels: model.scale)
    x, labels = batch(5, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipelined(model, LossMerging(), x, labels, 2)["loss"] == 0.5
