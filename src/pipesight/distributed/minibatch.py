"""One mini-batch on a rank: what is the same for all its stages, and what a forward leaves for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesight.context import MicrobatchToken, Observers, Where
from pipesight.distributed.failures import Watch
from pipesight.distributed.loss_check import Evidence
from pipesight.distributed.loss_weights import LossFunction
from pipesight.distributed.shapes import Flow
from pipesight.pipeline.checkpoint import SavedBuffers
from pipesight.pipeline.microbatch import Form, gather
from pipesight.pipeline.randomness import PassRandomness, SavedGenerators

__all__ = ["Checkpoint", "Minibatch", "Task"]


@dataclass(slots=True)
class Minibatch:
    """What is the same for all stages of a rank during one step."""

    flows: list[Flow]
    """One a micro-batch."""
    inputs: list[tuple[Tensor, ...]]
    """Of the first partition; empty elsewhere."""
    targets: list[Any]
    """Of the last partition; empty elsewhere, and where no loss is wanted."""
    loss_fn: LossFunction
    learns: bool
    randomness: PassRandomness
    where: Where
    observers: Observers
    watch: Watch
    weights: list[float] = field(default_factory=list)
    """What the loss of each micro-batch counts, in the last partition."""
    share: float = 0.0
    """What a weight of 1 makes of a loss, in the whole batch of all replicas; 0 if all weights are 0."""
    scale: float = 1.0
    """What gradients are multiplied with, against underflow."""
    evidence: Evidence | None = None
    """What a check of the loss needs, in the last partition."""
    tokens: list[MicrobatchToken] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, tuple[Form, list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = [MicrobatchToken(i) for i in range(len(self.flows))]

    def output(self) -> Any:
        """Return what the last partition gave, put together again."""
        form = self.outputs[0][0]
        return form(gather([self.outputs[i][1] for i in range(len(self.flows))]))


@dataclass(slots=True)
class Checkpoint:
    """What it takes, beside the inputs, to run a task again."""

    buffers: SavedBuffers
    generators: SavedGenerators


@dataclass(slots=True)
class Task:
    """What a forward leaves for its backward."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    checkpoint: Checkpoint | None = None
    loss: Tensor | None = None
    ends: list[Tensor] = field(default_factory=list)
    """The output, cut off from the graph of the partition: where the graph of the loss begins."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    groups: Any = None
    gradients: list[Tensor] = field(default_factory=list)
