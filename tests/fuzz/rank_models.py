"""Models for the fuzzer of the distributed engine: as they go into a pipeline, and as plain code runs them.

What a layer draws at random is kept, so that the plain run uses the same masks.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch._subclasses import FakeTensor

from pipesight import context
from pipesight.skip import pop, skippable, stash

__all__ = ["WIDTH", "make_layers", "make_loss", "run_plainly"]

WIDTH = 6


class Noise(nn.Module):
    """Dropout that remembers its masks, and checks that a recomputation draws them again."""

    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        mask = nn.functional.dropout(torch.ones_like(x), 0.3, self.training)
        if self.training and not isinstance(x, FakeTensor):
            where = context.current()
            if where.phase == "recompute" and not torch.equal(mask, self.masks[where.microbatch]):
                raise AssertionError("a recomputation drew other random numbers")
            self.masks[where.microbatch] = mask.detach()
        return x * mask


class Unused(nn.Module):
    """Has a parameter that nothing depends on, and one that only some inputs use."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * 1.5


class InPlace(nn.Module):
    def forward(self, x):
        return (x + 0).add_(0.5).mul_(0.9)


class Views(nn.Module):
    def forward(self, x):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)


class Apart(nn.Module):
    """Gives floats, integers and booleans."""

    def forward(self, x):
        return x[..., :2], x.argmax(-1), x > 0, x[..., 2:]


class Together(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, parts):
        left, index, positive, right = parts
        return torch.cat([left, right], -1) * (positive + 1) + self.embedding(index)


@functools.cache
def _stashing(number):
    name = f"skip{number}"

    @skippable(stash=[name])
    class Stash(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            yield stash(name, self.linear(x))
            return x * 0.7

    @skippable(pop=[name])
    class Pop(nn.Module):
        def forward(self, x):
            other = yield pop(name)
            return x + other

    return Stash, Pop


_MAKERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "tanh": nn.Tanh,
    "relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "noise": Noise,
    "unused": Unused,
    "inplace": InPlace,
    "views": Views,
    "apart": Apart,
    "together": Together,
}


def make_layers(names, seed, dtype):
    """Return the layers of these names, with weights that depend on the seed."""
    torch.manual_seed(seed)
    layers = []
    for name in names:
        kind, _, number = name.partition(":")
        made = _stashing(int(number))[kind == "pop"]() if number else _MAKERS[kind]()
        layers.append(made.to(getattr(torch, dtype)))
    return layers


def make_loss(name, dtype):
    """Return the arguments that a pipeline takes for a loss."""
    weight = torch.arange(1.0, WIDTH + 1, dtype=getattr(torch, dtype)) / 3
    functional = nn.functional
    return {
        "mse": {"loss_fn": functional.mse_loss},
        "module": {"loss_fn": nn.SmoothL1Loss()},
        "sum": {"loss_fn": nn.MSELoss(reduction="sum")},
        "partial": {"loss_fn": functools.partial(functional.l1_loss, reduction="sum")},
        "lambda": {"loss_fn": lambda output, target: ((output - target) ** 4).mean() + output.mean()},
        "classes": {"loss_fn": functional.cross_entropy},
        "padded": {"loss_fn": functools.partial(functional.cross_entropy, ignore_index=-7)},
        "weighted": {"loss_fn": nn.CrossEntropyLoss(weight=weight)},
        "masked": {
            "loss_fn": lambda output, target: (
                ((output - target[0]) ** 2 * target[1]).sum() / target[1].expand_as(output).sum()
            ),
            "loss_weight": lambda output, target: target[1].sum(),
        },
    }[name]


class _Deferred:
    """What a BatchNorm sees in a mini-batch, for statistics of the whole of it."""

    def __init__(self):
        self.seen = {}

    def call(self, layer, x):
        self.seen.setdefault(layer, []).append(x.detach())
        return nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)

    def update(self):
        for layer, inputs in self.seen.items():
            whole = torch.cat(inputs)
            layer.running_mean.lerp_(whole.mean(0), layer.momentum)
            layer.running_var.lerp_(whole.var(0), layer.momentum)
            layer.num_batches_tracked += 1


def run_plainly(layers, names, microbatches, masks, *, deferred=False):
    """Run layers on micro-batches, one after the other, without the engine; return the outputs."""
    outputs, later = [], _Deferred()
    for i, x in enumerate(microbatches):
        skips = {}
        for k, (name, layer) in enumerate(zip(names, layers, strict=True)):
            kind, _, number = name.partition(":")
            if kind == "stash":
                skips[number] = layer.linear(x)
                x = x * 0.7
            elif kind == "pop":
                x = x + skips.pop(number)
            elif kind == "noise":
                x = x * masks[k][i] if layer.training else x
            elif kind == "batchnorm" and deferred and layer.training:
                x = later.call(layer, x)
            else:
                x = layer(x)
        outputs.append(x)
    later.update()
    return outputs
