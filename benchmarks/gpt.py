"""A GPT of 124 million parameters, cut into modules as finely as those of common libraries are: 160 of them.

Its mini-batch is fed in micro-batches: by hand, by a `GPipe` on one device, or by hand to blocks that are compiled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Training"]

HEADS, WIDTH, BLOCKS, VOCABULARY = 12, 768, 12, 50257
BATCH, CHUNKS, LENGTH = 64, 8, 512
BALANCE = [4, 3, 4, 3]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        y: Tensor = self.dropout(self.tokens(tokens) + self.places(places))
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        y: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return y


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.down(self.act(self.up(x))))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.residual1 = nn.Identity()
        self.norm2, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()
        self.residual2 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(x + self.attention(self.norm1(x)))
        y: Tensor = self.residual2(x + self.feed_forward(self.norm2(x)))
        return y


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.logits(self.norm(x))
        return y


@dataclass
class Training:
    """A model with its mini-batch and optimizer.

    ``how`` it is run: ``plain``, ``piped`` or ``compiled``; ``large``: plain, in so few micro-batches that the device,
    not the interpreter, is what a step waits for.
    """

    how: str

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Embed(), *(Block() for _ in range(BLOCKS)), Head()).to("cuda", torch.bfloat16)
        if self.how == "compiled":
            for block in model:
                block.compile()
        self.model: nn.Module = model
        if self.how == "piped":
            from pipesight import GPipe

            self.model = GPipe(model, BALANCE, devices=["cuda:0"] * len(BALANCE), chunks=CHUNKS, checkpoint="never")
        self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self._tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
        self._targets = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")

    def step(self) -> None:
        for tokens, targets in self._parts():
            logits = self.model(tokens)
            (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * len(tokens) / BATCH).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = {"piped": 1, "large": CHUNKS // 4}.get(self.how, CHUNKS)
        yield from zip(self._tokens.chunk(count), self._targets.chunk(count), strict=True)
