"""A layer that changes its input in place does so for all who hold it, or is refused; never for some of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipesight import GPipe
from pipesight.pipeline.aliasing import region_of
from pipesight.skip import pop, skippable, stash
from support.against_plain import Fn, assert_same, modes, rand, total


class InPlace(nn.Module):
    inplace = True

    def forward(self, x):
        if isinstance(x, tuple):
            return (x[0].mul_(1.5), *x[1:])
        return x.mul_(1.5)


class InPlaceButSilent(InPlace):
    inplace = None


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip * 3


def scale():
    return Fn(lambda s, x: x * s.a)


REFUSED = {
    "twice in a tuple": ([Fn(lambda s, x: (x.mul(s.a),) * 2), InPlace(), Fn(lambda s, x: x[0] + x[1] * s.b)], [1, 2]),
    "views in a tuple": (
        [Fn(lambda s, x: (y := x * s.a, y[:, 1:])), InPlace(), Fn(lambda s, x: x[0][:, 1:] + x[1])],
        [1, 2],
    ),
    "skip to a later partition": ([scale(), Stash(), nn.ReLU(inplace=True), scale(), Pop()], [2, 1, 2]),
    "skip to the same partition": ([scale(), Stash(), InPlace(), Pop()], [2, 2]),
    "handed through on the way": ([scale(), Stash(), nn.Identity(), InPlace(), Pop()], [2, 1, 1, 1]),
}


@modes
@pytest.mark.parametrize("kind", REFUSED)
def test_shared_between_partitions(kind, checkpoint):
    """What was stashed, or is twice in a tuple, and changed in place by another partition, is refused."""
    layers, balance = REFUSED[kind]
    model = nn.Sequential(*copy.deepcopy(layers))
    total(model(rand(4, 3))).backward()  # the plain model takes it
    pipe = GPipe(model, balance, chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="use inplace=False, clone"):
        pipe(rand(4, 3))


SAME = {
    "skip within a partition": ([scale(), Stash(), InPlace(), Pop()], [1, 3]),
    "cloned before": ([scale(), Stash(), Fn(lambda s, x: x.clone()), InPlace(), Pop()], [2, 2, 1]),
    "changed, then stashed": ([scale(), InPlace(), Stash(), scale(), Pop()], [1, 1, 2, 1]),
    "handed through first": ([scale(), nn.Identity(), nn.Identity(), InPlace(), scale()], [2, 2, 1]),
    "viewed first": ([scale(), nn.Unflatten(1, (1, 3)), nn.Flatten(), InPlace(), scale()], [1, 3, 1]),
    "columns of one tensor": (
        [Fn(lambda s, x: ((y := x * s.a)[:, :1], y[:, 1:])), InPlace(), Fn(lambda s, x: torch.cat(x, 1) * s.b)],
        [1, 2],
    ),
}


@modes
@pytest.mark.parametrize("kind", SAME)
def test_shared_with_nobody(kind, checkpoint):
    """What no other partition holds may be changed in place, by any layer that says so."""
    layers, balance = SAME[kind]
    assert_same(nn.Sequential(*copy.deepcopy(layers)), rand(5, 3), balance, chunks=2, checkpoint=checkpoint)


@modes
def test_without_saying_so(checkpoint):
    """A change in place by a layer that does not say so works, or is refused where it would be recomputed."""
    model = nn.Sequential(scale(), nn.Identity(), InPlaceButSilent(), scale())
    if checkpoint != "always":
        assert_same(model, rand(4, 3), [1, 3], chunks=1, checkpoint=checkpoint)
        return
    with pytest.raises(RuntimeError, match="inplace = True"):
        GPipe(model, [1, 3], checkpoint=checkpoint)(rand(4, 3))


@modes
def test_copies_are_made_only_where_they_are_needed(checkpoint):
    """A partition whose layers leave its input alone is given the input itself after the first pass."""
    seen = []

    def note(s, x):
        seen.append(x.data_ptr())
        return x * s.a

    pipe = GPipe(nn.Sequential(Fn(note), nn.ReLU(inplace=True)), [2], chunks=1, checkpoint=checkpoint)
    x = rand(4, 3)
    for _ in range(2):
        pipe(x).sum().backward()
    assert seen[-1] == x.data_ptr()


def test_regions():
    """Two tensors overlap if an element is in both, whatever their strides."""
    x = torch.zeros(4, 6)
    overlap = lambda a, b: region_of(a).overlaps(region_of(b))
    assert overlap(x, x[1:2])
    assert overlap(x[:, ::2], x[2])
    assert overlap(x.t(), x)
    assert not overlap(x[:, :3], x[:, 3:])
    assert not overlap(x[:, ::2], x[:, 1::2])
    assert not overlap(x, x.clone())
    assert not overlap(x[:0], x)
    assert region_of(torch.eye(2).to_sparse()) is None
    assert region_of(None) is None
