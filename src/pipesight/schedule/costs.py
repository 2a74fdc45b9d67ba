"""What a model costs, layer by layer: the time and the bytes of a whole batch, and what each task takes on top.

A stage takes, for each of m micro-batches::

    sum over its layers (time of a batch / m + time of each micro-batch) + overhead of a task
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["WEIGHT_SHARE", "Costs", "Layer", "Link"]

WEIGHT_SHARE = 0.5
"""Of the gradients of weights in a backward, unless it is known."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer on a whole batch: seconds and bytes."""

    name: str
    """Its name in the model."""
    forward: float
    """Seconds."""
    backward: float
    """Seconds, recomputation not included."""
    recompute: float | None = None
    """As long as the forward, unless it is known."""
    forward_each: float = 0.0
    """Seconds of each micro-batch, however small, on top."""
    backward_each: float = 0.0
    """The same for the backward."""
    kept_bytes: float = 0.0
    """Kept from forward to backward where it is not recomputed, the output included."""
    output_bytes: float = 0.0
    """What goes to the next layer."""
    parameter_bytes: float = 0.0
    """Parameters alone, without gradients or optimizer state."""

    def __post_init__(self) -> None:
        times = (self.forward, self.backward, self.recompute or 0.0, self.forward_each, self.backward_each)
        sizes = (self.kept_bytes, self.output_bytes, self.parameter_bytes)
        if not all(0 <= cost < math.inf for cost in (*times, *sizes)):
            raise ValueError(f"costs must be finite and not negative (layer {self.name!r}: {times}, {sizes})")


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one device to the next; by default, it takes no time."""

    bandwidth: float = math.inf
    """Bytes a second."""
    latency: float = 0.0
    """Seconds."""

    def seconds(self, size: float) -> float:
        """Return how long so many bytes take."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Costs:
    """All that a plan needs to know about a model.

    Example::

        layers = [Layer(f"block{k}", forward=0.010, backward=0.020) for k in range(12)]
        costs = Costs(tuple(layers), samples=256)
    """

    layers: tuple[Layer, ...]
    """In the order of the model."""
    samples: int | None = None
    """In a batch; there cannot be more micro-batches."""
    input_bytes: float = 0.0
    """Of a whole batch of the model's input."""
    forward_overhead: float = 0.0
    """Seconds of each forward task beside its layers."""
    recompute_overhead: float = 0.0
    """The same of each recomputation."""
    backward_overhead: float = 0.0
    """The same of each backward task."""
    forward_gap: float = 0.0
    """Seconds until a forward task begins once its device is free and its input is there. Less than 0 if tasks hand on
    their outputs before they end."""
    recompute_gap: float = 0.0
    """The same of a recomputation."""
    backward_gap: float = 0.0
    """The same of a backward task."""
    loss: float = 0.0
    """Seconds from the last forward to the first backward of a batch."""
    jitter: float = 1.0
    """How much longer a mini-batch takes since tasks do not always take equally long."""
    outside: float = 0.0
    """Seconds of a step that are not spent in the pipeline: data, optimizer, and so on."""
    minibatches: int = 1
    """How many go through the pipeline in a step."""
    weight_share: float = WEIGHT_SHARE
    """The share of the gradients of weights in a backward, where a schedule keeps them apart."""
    link: Link = field(default_factory=Link)
    """What a transfer between devices takes."""
    rates: tuple[float, ...] = ()
    """How fast each of 1, 2, ... devices computes while so many do; empty if they do not slow each other down."""
    notes: tuple[str, ...] = ()
    """What is not known for sure."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("costs must have a layer (layers: 0)")
