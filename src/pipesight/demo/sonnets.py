"""The training data of the demo: 34 of Shakespeare's sonnets (public domain, see sonnets.md), as numbers."""

from __future__ import annotations

from importlib import resources

import torch
from torch import Tensor

__all__ = ["SonnetText"]


class SonnetText:
    """A text as numbers, and random batches of it to train on.

    Example::

        verse = SonnetText.sonnets()
        inputs, targets = verse.batch(32, length=32, generator=torch.Generator())
    """

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self._numbers = {character: number for number, character in enumerate(self.alphabet)}
        self.tokens = self.encode(text)

    @classmethod
    def sonnets(cls) -> SonnetText:
        """Read the sonnets that come with the package."""
        return cls(resources.files(__package__).joinpath("sonnets.txt").read_text(encoding="ascii"))

    def encode(self, text: str) -> Tensor:
        """Turn each character into its index in the alphabet."""
        return torch.tensor([self._numbers[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        """Turn numbers back into characters."""
        return "".join(self.alphabet[number] for number in tokens.tolist())

    def batch(self, size: int, *, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pick ``size`` pieces at random; return them, and the same pieces one character later."""
        starts = torch.randint(len(self.tokens) - length, (size, 1), generator=generator)
        pieces = self.tokens[starts + torch.arange(length + 1)]
        return pieces[:, :-1], pieces[:, 1:]
