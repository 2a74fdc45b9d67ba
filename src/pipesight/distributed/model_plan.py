"""What a call of a model sends from partition to partition: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesight.distributed.loss_weights import Mean
from pipesight.distributed.model_walk import Name, UnitResult

__all__ = ["Crossing", "Plan", "PlannedCut"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that goes from one partition to another."""

    name: Name
    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    """Whether it needs a gradient."""
    way: int
    """A checksum of the calls that lead to it, if it is made inside a unit."""

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """What one micro-batch sends over a cut; some of it only passes the next partition."""

    tensors: tuple[Crossing, ...]


@dataclass(slots=True)
class Plan:
    """What a call does, the same on every rank."""

    cuts: list[PlannedCut]
    """Before the first partition, where nothing crosses, after it, and so on."""
    needs: list[set[Name]]
    """What each partition takes of earlier ones."""
    counts: list[int]
    """How many calls there are in each."""
    watched: set[tuple[int, int]]
    """Calls of units inside which something crosses."""
    results: dict[tuple[int, int], UnitResult]
    """What calls of units return; those that are not there must be made."""
    parameters: list[set[str]]
    """Those that each partition uses, by name."""
    random: bool
    """Whether random numbers are drawn."""
    reads: list[Any]
    """What the model has read of the values of its arguments: if it reads something else, it may take another way."""
    units: list[list[str]]
    """Those that each partition is the first to call."""
    changes: set[int]
    """The arguments that the model changes in place, by their place among the tensors in them."""
    means: tuple[Mean, ...]
    """What the means are over that the result adds, if that follows from the arguments."""

    def fingerprint(self) -> str:
        """Return what ranks compare."""
        return repr((self.cuts, self.counts, sorted(self.watched)))
