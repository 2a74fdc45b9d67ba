"""The models that are measured, each a plain `nn.Sequential` that every contender runs unchanged."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WORKLOADS", "Loop", "Workload", "gpt", "identity", "mlp", "sleepers", "tiny", "transformer", "unet"]


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A model with one mini-batch for it, and its loss, a mean over samples."""

    model: nn.Sequential
    input: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss


def mlp(*, layers: int = 8, width: int = 512, batch: int = 2048) -> Workload:
    """Linear layers of one width, each with its ReLU: as balanced as a model can be."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return Workload(nn.Sequential(*blocks), torch.randn(batch, width), torch.randn(batch, width))


def tiny(*, layers: int = 8, width: int = 64, batch: int = 512) -> Workload:
    """Layers too small to fill a device, so that the cost of running a task shows."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return Workload(model, torch.randn(batch, width), torch.randn(batch, width))


def identity(*, layers: int = 4, batch: int = 32) -> Workload:
    """Layers that do nothing, so that nothing but the cost of running a task is left."""
    model = nn.Sequential(*(nn.Identity() for _ in range(layers)))
    return Workload(model, torch.randn(batch, 1, requires_grad=True), torch.randn(batch, 1))


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network, normalised first, no dropout."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        # (batch, sequence, 3 * dim) -> three of (batch, heads, sequence, dim / heads)
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def transformer(*, layers: int = 8, dim: int = 256, heads: int = 4, sequence: int = 64, batch: int = 32) -> Workload:
    """A stack of equal transformer blocks on already embedded tokens."""
    model = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
    return Workload(model, torch.randn(batch, sequence, dim), torch.randn(batch, sequence, dim))


class Embedding(nn.Module):
    """Tokens, and the places where they stand."""

    def __init__(self, vocabulary: int, sequence: int, dim: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Parameter(torch.randn(sequence, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.tokens(tokens) + self.places
        return y


def gpt(
    *, layers: int = 8, dim: int = 256, heads: int = 4, sequence: int = 64, batch: int = 32, vocabulary: int = 256
) -> Workload:
    """An embedding, equal transformer blocks, and a head."""
    head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, vocabulary))
    blocks = [Block(dim, heads) for _ in range(layers)]
    model = nn.Sequential(Embedding(vocabulary, sequence, dim), *blocks, head)
    return Workload(model, torch.randint(vocabulary, (batch, sequence)), torch.randn(batch, sequence, vocabulary))


class Loop(nn.Module):
    """The layers of `gpt` as most models have them: a list that the model's own forward goes through."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = model[0], nn.ModuleList(list(model)[1:-1]), model[-1]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Trained(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.model(inputs), target)


class _Sleep(torch.autograd.Function):
    """Passes a tensor on after some seconds, and its gradient after others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        ctx.save_for_backward(x)  # so that there is something to recompute
        time.sleep(there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        assert ctx.saved_tensors
        time.sleep(ctx.back)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """A layer that takes a time of its own for each sample; the gradient of its input does, and that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        took = self.seconds * len(x)
        y: Tensor = _Sleep.apply(x, took, took)  # type: ignore[no-untyped-call]
        weight: Tensor = _Sleep.apply(self.weight, 0.0, took)  # type: ignore[no-untyped-call]
        return y + weight


def sleepers(*, layers: int = 12, microseconds: int = 500, batch: int = 48) -> Workload:
    """Layers of which every third takes twice as long; they need no processor, so none slows another down."""
    times = [microseconds * 1e-6 * (2 if k % 3 == 2 else 1) for k in range(layers)]
    blocks = [nn.Sequential(Sleeper(seconds)) for seconds in times]  # blocks are recomputed, single layers are not
    return Workload(nn.Sequential(*blocks), torch.randn(batch, 8), torch.randn(batch, 8))


Carried = tuple[Tensor, ...]


class Convolutions(nn.Module):
    """Two 3x3 convolutions; GroupNorm, unlike BatchNorm, gives micro-batches the gradients of the whole."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
            nn.GroupNorm(8, channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
            nn.GroupNorm(8, channels_out),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


# The skips travel as a stack behind the tensor that is worked on, past the layers that do not use them:
#
#     down    (x, *skips)       -> (half of y, y, *skips)
#     bottom  (x, *skips)       -> (y, *skips)
#     up      (x, skip, *skips) -> (twice y, *skips)


class Down(nn.Module):
    """Convolve, put the result on the stack of skips, and halve it."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolutions = Convolutions(channels_in, channels_out)

    def forward(self, carried: Tensor | Carried) -> Carried:
        x, *skips = (carried,) if isinstance(carried, Tensor) else carried
        y = self.convolutions(x)
        return (F.max_pool2d(y, 2), y, *skips)


class Bottom(nn.Module):
    """Convolve at the lowest resolution."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolutions = Convolutions(channels_in, channels_out)

    def forward(self, carried: Carried) -> Carried:
        x, *skips = carried
        return (self.convolutions(x), *skips)


class Up(nn.Module):
    """Double the resolution, take the matching skip off the stack, and convolve both."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2)
        self.convolutions = Convolutions(2 * channels_out, channels_out)

    def forward(self, carried: Carried) -> Carried:
        x, skip, *skips = carried
        return (self.convolutions(torch.cat([self.upsample(x), skip], dim=1)), *skips)


class Head(nn.Module):
    """Project the one tensor that is left to the channels of the image."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, carried: Carried) -> Tensor:
        (x,) = carried
        y: Tensor = self.project(x)
        return y


def unet(*, depth: int = 4, width: int = 64, image: int = 128, batch: int = 64) -> Workload:
    """A U-Net of `2 * depth + 2` layers whose skips are carried along in tuples."""
    channels = [width * 2**level for level in range(depth + 1)]
    model = nn.Sequential(
        Down(3, width),
        *(Down(channels[level - 1], channels[level]) for level in range(1, depth)),
        Bottom(channels[depth - 1], channels[depth]),
        *(Up(channels[level + 1], channels[level]) for level in reversed(range(depth))),
        Head(width, 3),
    )
    return Workload(model, torch.randn(batch, 3, image, image), torch.randn(batch, 3, image, image))


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "gpt": gpt,
    "identity": identity,
    "mlp": mlp,
    "sleepers": sleepers,
    "tiny": tiny,
    "transformer": transformer,
    "unet": unet,
}
