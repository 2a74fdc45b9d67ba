"""What is known of a model of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, CHUNKS = 6, 3

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A model, a mini-batch for it, and where it is cut into 4 partitions; the middle cut makes 2 of it."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[], Call]
    cuts: tuple[str, str, str]
    items: Callable[[dict[str, Any]], float] | None = None
    """Of how many items the loss of a micro-batch is the mean; ``None``: the model returns no loss."""
    options: dict[str, Any] = field(default_factory=dict)
    """What a pipeline must be told beside the cuts."""
    output_dim: int = 0
    """The batch dimension of what the model returns."""
    needs: str = "transformers"

    def build(self) -> nn.Module:
        """Return the model in training mode, always with the same weights."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make().train()

    def batch(self) -> Call:
        """Return the arguments of a call, always the same."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.call()

    def cuts_into(self, partitions: int) -> list[str]:
        return {2: [self.cuts[1]], 4: list(self.cuts)}[partitions]


def samples(call: dict[str, Any]) -> float:
    """Count the samples of a call."""
    return float(len(next(value for value in call.values() if isinstance(value, Tensor))))


def layers(prefix: str) -> tuple[str, str, str]:
    """Return cuts that give four layers a partition each."""
    return f"{prefix}.1", f"{prefix}.2", f"{prefix}.3"


def hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what builds a model of transformers from the settings of its configuration."""

    def make() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built

    return make
