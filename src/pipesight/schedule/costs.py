"""The costs of a model, layer by layer: time and bytes for a whole batch, and the overhead of each task.

A stage takes, for each of m micro-batches::

    sum over its layers (time of a batch / m + time of each micro-batch) + overhead of a task
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["SPLIT_COST", "WEIGHT_SHARE", "Costs", "Layer", "Link", "Peak"]

WEIGHT_SHARE = 0.5
"""The assumed share of weight gradients in a backward, where it is not known."""
SPLIT_COST = 0.04
"""How much longer a backward takes in two parts, as a share: nodes that lead both ways run twice, and read twice what
they share. Processors took 4.2% more for transformer blocks, and as much for linear layers."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What a layer takes while it runs on a whole batch, in bytes, without gradients of weights."""

    forward: float = 0.0
    """The most in its forward, above what was in use before."""
    forward_left: float = 0.0
    """What more is in use after it."""
    backward: float = 0.0
    """The most in its backward."""
    backward_left: float = 0.0
    """What more is in use after that; negative, where it frees what it had kept."""


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
    """``None``: as long as the forward."""
    forward_each: float = 0.0
    """Additional seconds for each micro-batch, however small."""
    backward_each: float = 0.0
    """The same for the backward."""
    kept_bytes: float = 0.0
    """Bytes kept from forward to backward if it is not recomputed, and not by an earlier layer."""
    shared_bytes: float = 0.0
    """What of that does not come on top of the layer's input, where that is kept because a stage begins here."""
    waiting_bytes: float = 0.0
    """The gradients that its weights wait for, where their part of the backward comes later."""
    output_bytes: float = 0.0
    """What goes to the next layer."""
    parameter_bytes: float = 0.0
    """Parameters alone, without gradients or optimizer state."""
    checkpointed: bool = True
    """Whether checkpointing runs it again. Of a model that is cut at modules, those without modules inside are not."""
    peak: Peak = Peak()
    """What it takes in the middle of tasks, where that is known."""

    def __post_init__(self) -> None:
        times = (self.forward, self.backward, self.recompute or 0.0, self.forward_each, self.backward_each)
        sizes = (self.kept_bytes, self.output_bytes, self.parameter_bytes)
        if not math.isfinite(self.shared_bytes):
            raise ValueError(f"shared bytes must be finite (layer {self.name!r}: {self.shared_bytes})")
        if not all(0 <= cost < math.inf for cost in (*times, *sizes)):
            raise ValueError(f"costs must be finite and not negative (layer {self.name!r}: {times}, {sizes})")


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two devices; by default, transfers take no time."""

    bandwidth: float = math.inf
    """Bytes per second."""
    latency: float = 0.0
    """Seconds."""

    def seconds(self, size: float) -> float:
        """Return how long a transfer of this many bytes takes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan needs to know about a model.

    Example::

        layers = [Layer(f"block{k}", forward=0.010, backward=0.020) for k in range(12)]
        costs = Costs(tuple(layers), samples=256)
    """

    layers: tuple[Layer, ...]
    """In the order of the model."""
    samples: int | None = None
    """Samples in a batch; there cannot be more micro-batches."""
    input_bytes: float = 0.0
    """Of a whole batch of the model's input."""
    loss_bytes: float = 0.0
    """What a loss inside the pipeline keeps of a whole batch, checkpointed or not."""
    loss_peak: Peak = Peak()
    """What it takes while it runs."""
    outside_peak: tuple[float, float] = (0.0, 0.0)
    """What a loss outside of the pipeline takes of the device of its outputs: at most, and what is left."""
    other_bytes: float = 0.0
    """What each device holds whatever the setting: tensors outside of the model, and buffers of libraries."""
    optimizer_scale: float = 0.0
    """Bytes that a step of the optimizer takes for each byte of parameters while it runs."""
    gradients: tuple[float, float] = (0.0, 1.0)
    """Bytes of gradients for each byte of parameters: those that are there before the first backward, from an earlier
    one, and those that are more from then on, until the optimizer's step."""
    forward_overhead: float = 0.0
    """Seconds of each forward task outside its layers."""
    recompute_overhead: float = 0.0
    """The same of each recomputation."""
    backward_overhead: float = 0.0
    """The same of each backward task."""
    forward_gap: float = 0.0
    """Seconds until a forward task begins once its device is free and its input has arrived. Negative if tasks pass on
    their outputs before they end."""
    recompute_gap: float = 0.0
    """The same of a recomputation."""
    backward_gap: float = 0.0
    """The same of a backward task."""
    loss: float = 0.0
    """Seconds from the last forward to the first backward of a batch."""
    loss_outside: bool = True
    """Whether in GPipe that comes after all forwards, as in `pipesight.GPipe`. Steps of a `Pipeline`, and ranks,
    compute the loss of each micro-batch in the last stage, in any schedule."""
    jitter: float = 1.0
    """By which factor a mini-batch takes longer because the times of tasks vary."""
    outside: float = 0.0
    """Seconds of a step outside the pipeline: data loading, optimizer, and so on."""
    minibatches: int = 1
    """Mini-batches per step."""
    weight_share: float = WEIGHT_SHARE
    """The share of weight gradients in a backward, for schedules that split it."""
    link: Link = field(default_factory=Link)
    """What a transfer between devices takes."""
    rates: tuple[float, ...] = ()
    """How fast each of 1, 2, ... devices computes while that many do; empty if they do not slow each other down."""
    notes: tuple[str, ...] = ()
    """Caveats for the reader of a plan."""
    by_cuts: bool = False
    """Whether the model is cut at modules, by their names, instead of by numbers of layers."""

    @property
    def units(self) -> list[str] | None:
        """The names of the layers, if the model is cut at modules."""
        return [layer.name for layer in self.layers] if self.by_cuts else None

    @property
    def peaks_known(self) -> bool:
        """Whether it is known what layers take in the middle of tasks."""
        return any(layer.peak != Peak() for layer in self.layers)

    @property
    def sizes_known(self) -> bool:
        """Whether the size of any layer is known."""
        return any(layer.parameter_bytes or layer.kept_bytes for layer in self.layers)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("costs must have at least one layer (layers: 0)")
