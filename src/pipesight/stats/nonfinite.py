"""Tensors that went NaN or Inf, in the order of computation.

weights      were there before the forward that uses them, however late they are looked at
forward      tensors as they came
backward     gradients as they came; that of a weight is made with the backward of its layer, before layers above it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pipesight.stats.moments import Moments

__all__ = ["EARLY", "Bad", "Layers", "NonfiniteError", "Place", "Spot", "in_order", "whole_spot"]

Spot: TypeAlias = tuple[int, int | None, int | None, str | None]
"""When a tensor came, as a number that grows, and its partition, micro-batch and phase, if it was in a pipeline."""


def whole_spot(spot: int | Spot) -> Spot:
    """Return when and where a tensor came, of which only a number may be given outside of pipelines."""
    return (spot, None, None, None) if isinstance(spot, int) else spot


EARLY = 1 << 62
"""Taken off the number of a weight that the step has not changed yet: it was there before all others came."""

GRADIENTS = ("gradient", "dgrad")


class NonfiniteError(RuntimeError):
    """A tensor has NaN or Inf, and the configuration says ``on_nonfinite: raise``. The message names the first one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor was measured."""

    layer: str
    tensor: str
    iteration: int
    partition: int | None = None
    microbatch: int | None = None
    phase: str | None = None

    def __str__(self) -> str:
        inside = "" if self.partition is None else f", partition {self.partition}"
        if self.microbatch is not None:
            inside += f", micro-batch {self.microbatch}, {self.phase}"
        return f"{self.tensor!r} of layer {self.layer!r} (iteration {self.iteration}{inside})"


@dataclass(frozen=True, slots=True)
class Bad:
    """A tensor with NaN or Inf.

    Attributes:
        number: When it came; below 0 for weights that the step has not changed yet.
    """

    place: Place
    moments: Moments
    number: int

    @property
    def name(self) -> tuple[str, str]:
        """Its layer, and what it is of it."""
        return self.place.layer, self.place.tensor

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """What sorts bad tensors of several ranks, whose numbers say nothing of each other: the way of the data."""
        partition, microbatch = self.place.partition or 0, self.place.microbatch or 0
        if self.number < 0:
            return 0, partition, 0, 0
        if self.place.tensor in (*GRADIENTS, "wgrad") or self.place.phase == "backward":
            return 2, -partition, self.place.tensor == "wgrad", microbatch
        return 1, partition + microbatch, partition, 0

    def __str__(self) -> str:
        m = self.moments
        return f"{self.place} has {m.nans:.0f} NaN and {m.infs:.0f} Inf of {m.count + m.nans + m.infs:.0f} numbers"


class Layers:
    """The layers of watched models, in order, and the partition that each is in."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}  # of the layers inside of it
        self._partitions: dict[str, int] = {}

    def add(self, names: Iterable[str], partitions: Mapping[str, int]) -> None:
        """Add the layers of a model."""
        for name in names:
            place = self._first.setdefault(name, len(self._first))
            while name:
                self._last[name] = place
                name = name.rpartition(".")[0]
        self._partitions.update(partitions)

    def bad(self, layer: str, tensor: str, iteration: int, spot: Spot, moments: Moments) -> Bad:
        """Return a bad tensor of a layer; outside of a pipeline's tasks, the layer says which partition it is in."""
        number, partition, microbatch, phase = spot
        if partition is None:
            partition = self._partitions.get(layer)
        return Bad(Place(layer, tensor, iteration, partition, microbatch, phase), moments, number)

    def is_below(self, name: str, other: str) -> bool:
        """Whether a layer comes after all of another one, as far as both are known."""
        return self._first.get(name, -1) > self._last.get(other, len(self._first))

    def place(self, name: str) -> int:
        """The place of a layer among all, those inside of it after it; -1 if it is not known."""
        return self._first.get(name, -1)


def in_order(found: Iterable[Bad], layers: Layers) -> list[Bad]:
    """Sort bad tensors by when they were computed."""
    ordered: list[Bad] = []
    of_weights: list[Bad] = []
    for bad in sorted(found, key=lambda bad: bad.number):
        (of_weights if bad.place.tensor == "wgrad" else ordered).append(bad)
    early = sum(bad.number < 0 for bad in ordered)
    ordered[:early] = _inner_first(ordered[:early])
    result: list[Bad] = []
    i = 0
    for bad in sorted(of_weights, key=lambda bad: (layers.place(bad.place.layer), -bad.number), reverse=True):
        while i < len(ordered) and not _is_later(ordered[i], bad, layers):
            result.append(ordered[i])
            i += 1
        result.append(bad)
    return result + ordered[i:]


def _is_later(bad: Bad, of_weight: Bad, layers: Layers) -> bool:
    """Whether something comes after the gradient of a weight: it is that of a layer further up, or a changed weight."""
    if bad.place.tensor == "weight":
        return bad.number >= 0
    return bad.place.tensor in GRADIENTS and layers.is_below(of_weight.place.layer, bad.place.layer)


def _inner_first(weights: list[Bad]) -> list[Bad]:
    """Put the weights of a layer before those of the layers around it, which are the same."""
    result: list[Bad] = []
    around: list[Bad] = []
    for bad in weights:
        while around and not bad.place.layer.startswith(f"{around[-1].place.layer}."):
            result.append(around.pop())
        around.append(bad)
    return result + around[::-1]
