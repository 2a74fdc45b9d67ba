"""The layers that the engine's fuzzer makes models of.

What goes from layer to layer is one tensor (``T``), two of them (``P``), or one and an index (``I``).
"""

from __future__ import annotations

import os
import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipesight import GPipe, context
from pipesight.skip import pop, skippable, stash

DEVICE = os.environ.get("FUZZ_DEVICE", "cpu")
"""What all partitions are on; with a GPU: ``FUZZ_DEVICE=cuda:0 make fuzz ONLY=test_engine``."""
WIDTH = 4


class Plain(threading.local):
    """Where the plain model is: pass and micro-batch."""

    run, i = 0, 0


plain = Plain()


def microbatch():
    """Return the micro-batch that the running layer works on, in a pipeline or in the plain model."""
    where = context.current()
    return plain.i if where is None else where.microbatch


class Fn(nn.Module):
    """A layer made of a function, with two parameters that it may use."""

    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH) * 0.5 + 1) for _ in range(2))

    def forward(self, x):
        return self.function(self, x)


class InPlace(nn.Module):
    """Changes its input in place, and says so."""

    def __init__(self, inplace=True):
        super().__init__()
        self.inplace = inplace

    def forward(self, x):
        first, *rest = x if isinstance(x, tuple) else (x,)
        changed = first.mul_(1.5) if self.inplace else first * 1.5
        return (changed, *rest) if rest else changed


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return 2 * g * x * weight, (g * x * x).sum(0)


class NoGradient(torch.autograd.Function):
    """Gives no gradient to its second input, though it depends on it."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


class Drop(nn.Module):
    """Drops what it draws, and notes it, by pass and micro-batch; in the plain model it repeats the notes."""

    def __init__(self):
        super().__init__()
        self.notes, self.order = {}, []

    def forward(self, x):
        where = context.current()
        if where is not None and where.serial not in self.notes:
            self.notes[where.serial] = {}
            self.order.append(where.serial)
        if not self.training:
            return x
        if where is None:
            known = self.notes[self.order[plain.run]] if plain.run < len(self.order) else {}
            return x * known.get(plain.i, 1)  # a pass that failed need not have come here
        mask = F.dropout(torch.ones_like(x), 0.4)
        if where.phase == "forward":
            self.notes[where.serial][where.microbatch] = mask
        else:
            assert torch.equal(mask, self.notes[where.serial][where.microbatch]), "recomputed with other numbers"
        return x * mask

    def __deepcopy__(self, memo):
        twin = type(self)()
        twin.training, twin.notes, twin.order = self.training, self.notes, self.order
        return twin


class Counting(nn.Module):
    """Depends on a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x * (1 + self.calls.to(x.dtype) / 8)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x).tanh())


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x.unsqueeze(1)).squeeze(1)


class Lookup(nn.Module):
    """Adds an embedding, of an index or of what it makes of its input."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, sparse=sparse)

    def forward(self, x):
        if isinstance(x, tuple):
            return x[0] + self.table(x[1] % 8)
        return x + self.table((x[:, 0].detach() * 3).long() % 8)


class Bomb(nn.Module):
    """Raises once it is armed, at one micro-batch in one phase."""

    def __init__(self):
        super().__init__()
        self.armed, self.fired = None, 0

    def go_off(self, phase):
        where = context.current()
        phase = where.phase if where is not None else phase
        if self.armed is not None and self.armed[:2] == (microbatch(), phase):
            self.fired += 1
            self.armed[2]()

    def forward(self, x):
        self.go_off("forward")
        values = [_Fuse.apply(t, self) if t.is_floating_point() else t for t in (x if isinstance(x, tuple) else (x,))]
        return tuple(values) if isinstance(x, tuple) else values[0]


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bomb):
        ctx.set_materialize_grads(False)
        ctx.bomb, ctx.i = bomb, microbatch()
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if context.current() is None:
            plain.i = ctx.i
        ctx.bomb.go_off("backward")
        return g, None


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        x = x * self.a
        yield stash("skip", x if self.how == "add" else x * 3)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        skip = yield pop("skip")
        return x + {"add": skip, "detach": skip.detach(), "drop": 0}[self.how]


def odd(x):
    """Tell micro-batches apart by their numbers."""
    return bool((x.detach()[0].float().sum() * 10).floor().long() % 2) if len(x) else False


def linear(k=2):
    return nn.Sequential(*(layer for _ in range(k) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


LAYERS = {
    "linear": ("T", "T", lambda: nn.Linear(WIDTH, WIDTH)),
    "tanh": ("T", "T", nn.Tanh),
    "identity": ("any", "same", nn.Identity),
    "block": ("T", "T", linear),
    "relu_": ("T", "T", lambda: nn.ReLU(inplace=True)),
    "mul_": ("any", "same", InPlace),
    "inner in place": ("T", "T", lambda: Fn(lambda s, x: (x * s.a).add_(s.b).relu_())),
    "conv": ("T", "T", Convolution),
    "layer norm": ("T", "T", lambda: nn.LayerNorm(WIDTH)),
    "batch norm": ("T", "T", lambda: nn.BatchNorm1d(WIDTH)),
    "group norm": ("T", "T", lambda: nn.GroupNorm(2, WIDTH)),
    "drop": ("T", "T", Drop),
    "counting": ("T", "T", Counting),
    "lookup": ("T", "T", Lookup),
    "sparse lookup": ("T", "T", lambda: Lookup(sparse=True)),
    "tied": ("T", "T", Tied),
    "unused": ("T", "T", lambda: Fn(lambda s, x: x * s.a)),
    "unused in some": ("T", "T", lambda: Fn(lambda s, x: x * (s.a if odd(x) else s.b))),
    "detach": ("T", "T", lambda: Fn(lambda s, x: x.detach() * s.a)),
    "detach all": ("T", "T", lambda: Fn(lambda s, x: (x * s.a).detach())),
    "detach in some": ("T", "T", lambda: Fn(lambda s, x: (x if odd(x) else x.detach()) * s.b)),
    "no grad": ("T", "T", lambda: Fn(lambda s, x: _without_grad(s, x))),
    "square": ("T", "T", lambda: Fn(lambda s, x: Square.apply(x * s.a, s.b))),
    "no gradient": ("T", "T", lambda: Fn(lambda s, x: NoGradient.apply(x * s.a, s.b))),
    "checkpoint": ("T", "T", lambda: Checkpointed(linear(), False)),
    "reentrant": ("T", "T", lambda: Checkpointed(linear(), True)),
    "asks": ("T", "T", lambda: Fn(lambda s, x: (context.current_microbatch(), x * s.a)[1])),
    "inner pipeline": ("T", "T", lambda: GPipe(linear(), [2, 2], devices=[DEVICE] * 2, chunks=2)),
    "view": ("T", "T", lambda: Fn(lambda s, x: x.flip(1).t().contiguous().t().view_as(x))),
    "parameter": ("T", "T", lambda: Fn(lambda s, x: s.a.expand(len(x), WIDTH) + 0 * x.detach())),
    "split": ("T", "P", lambda: Fn(lambda s, x: (x * s.a, x * s.b))),
    "split detached": ("T", "P", lambda: Fn(lambda s, x: (x * s.a, (x * s.b).detach()))),
    "twice": ("T", "P", lambda: Fn(lambda s, x: (x, x * s.b))),
    "alias": ("T", "P", lambda: Fn(lambda s, x: (lambda y: (y, y))(x * s.a))),
    "index": ("T", "I", lambda: Fn(lambda s, x: (x * s.a, x.argmax(1)))),
    "join": ("P", "T", lambda: Fn(lambda s, x: x[0] * s.a + x[1] * s.b)),
    "left": ("P", "T", lambda: Fn(lambda s, x: x[0] * s.a)),
    "swap": ("P", "P", lambda: Fn(lambda s, x: (x[1] * s.a, x[0]))),
    "right detached": ("P", "P", lambda: Fn(lambda s, x: (x[0], x[1].detach() * s.b))),
    "look up index": ("I", "T", Lookup),
    "drop index": ("I", "T", lambda: Fn(lambda s, x: x[0] * s.a)),
    "pass index": ("I", "I", lambda: Fn(lambda s, x: (x[0] * s.a, x[1] + 1))),
}


def _without_grad(layer, x):
    with torch.no_grad():
        return x * layer.a


def twin_of(module):
    """Turn a model into one that does the same, but nothing that torch may refuse."""
    for child in module.modules():
        if getattr(child, "inplace", False) is True:
            child.inplace = False
        if isinstance(child, Checkpointed):
            child.reentrant = False
    return module
