"""The demo's model: a character-level GPT whose layers are those of one `nn.Sequential`.

::

    tokens ──> embed ──> block0 ──> ... ──> block5 ──> head ──> a score for each character of the alphabet
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CharEmbedding", "CharHead", "TransformerBlock", "char_gpt"]


def char_gpt(
    alphabet: int, *, width: int = 64, heads: int = 4, blocks: int = 6, context: int = 32, dropout: float = 0.1
) -> nn.Sequential:
    """Make the model: ``blocks + 2`` layers, which a pipeline can cut anywhere."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=CharEmbedding(alphabet, width, context, dropout))
    for index in range(blocks):
        layers[f"block{index}"] = TransformerBlock(width, heads, dropout)
    layers["head"] = CharHead(width, alphabet)
    return nn.Sequential(layers)


class CharEmbedding(nn.Module):
    """Looks up each character, and adds where it stands."""

    def __init__(self, alphabet: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.character = nn.Embedding(alphabet, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        for table in (self.character, self.position):
            nn.init.normal_(table.weight, std=0.3)  # the default, 1, would drown what the blocks add

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn (samples, characters) into (samples, characters, width)."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        output: Tensor = self.dropout(self.character(tokens) + self.position(places))
        return output


class TransformerBlock(nn.Module):
    """Self-attention over the characters so far, then a feed-forward network for each character."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        """Add what attention, then what the feed-forward layers found."""
        input = input + self.dropout(self._attend(self.attention_norm(input)))
        output: Tensor = input + self.dropout(self.feedforward(input))
        return output

    def _attend(self, input: Tensor) -> Tensor:
        split = self.query_key_value(input).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.transpose(1, 3).unbind(2)  # each: samples, heads, characters, width of a head
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.merge(found.transpose(1, 2).flatten(2))
        return output


class CharHead(nn.Module):
    """Scores every character of the alphabet as the next one."""

    def __init__(self, width: int, alphabet: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, alphabet)

    def forward(self, input: Tensor) -> Tensor:
        """Turn (samples, characters, width) into (samples, characters, alphabet)."""
        output: Tensor = self.scores(self.norm(input))
        return output
