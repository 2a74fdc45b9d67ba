"""One mini-batch on a rank: what all its stages share, its loss, and what a forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipesight._nested import tensors_in
from pipesight.context import Kept, MicrobatchToken, Observers, Where
from pipesight.distributed.failures import RankMonitor
from pipesight.distributed.loss_check import Evidence
from pipesight.distributed.loss_weights import LossFunction
from pipesight.pipeline.checkpoint import Checkpoint
from pipesight.pipeline.microbatch import Form, gather
from pipesight.pipeline.randomness import PassRandomness
from pipesight.pipeline.split_backward import RestOfBackward

__all__ = ["BatchLoss", "LocalGraph", "MiniBatch"]


@dataclass(slots=True)
class BatchLoss:
    """The loss of a mini-batch, in the last partition: what goes into it, and what comes out."""

    loss_fn: LossFunction
    targets: list[Any]
    """One per micro-batch; empty in other partitions, and where no loss is wanted."""
    weights: list[float]
    """How much the loss of each micro-batch counts."""
    share: float
    """What the loss of a micro-batch of weight 1 is multiplied by, in the batch of all replicas; 0 if no weight is."""
    scale: float
    """What gradients are multiplied by, against underflow."""
    evidence: Evidence | None = None
    """What a check of the loss needs."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """What each micro-batch adds to the loss of the batch."""

    def add(
        self, i: int, loss: Tensor, output: tuple[Form, list[Tensor]], value: Tensor | None = None
    ) -> Tensor | None:
        """Add the loss of a micro-batch; return what its backward starts from, or ``None`` if it counts nothing.

        One of weight 0 may be NaN, as the mean of nothing is. ``value`` is that of the loss, if its gradient was scaled
        elsewhere.
        """
        own = loss.detach() if value is None else value.to(loss)
        weight = self.weights[i] * self.share
        if self.share:
            self.values[i] = own * weight if weight else torch.zeros_like(own)
        else:  # nothing in the whole batch counts: the loss is what the plain model's is
            self.values[i] = own / len(self.targets)
        if self.evidence is not None and i < self.evidence.count:
            form, tensors = output
            self.evidence.outputs[i] = form, [t.detach() for t in tensors]
            self.evidence.losses[i] = own
        return loss * (weight * self.scale) if weight else None


@dataclass(slots=True)
class MiniBatch:
    """What all tasks of one mini-batch know, on this rank."""

    flows: Sequence[Any]
    """What each micro-batch sends: a `Flow`, or the `Plan` of a call of any model."""
    inputs: list[tuple[Tensor, ...]]
    """Of the first partition; empty elsewhere."""
    loss: BatchLoss
    learns: bool
    randomness: PassRandomness
    where: Where
    observers: Observers
    monitor: RankMonitor
    tokens: list[MicrobatchToken] = field(init=False)
    outputs: dict[int, tuple[Form, list[Tensor]]] = field(default_factory=dict)
    """Of the last partition, where no loss is wanted."""

    def __post_init__(self) -> None:
        self.tokens = [MicrobatchToken(i) for i in range(len(self.flows))]

    def output(self) -> Any:
        """Return the output of the last partition for the whole mini-batch."""
        form = self.outputs[0][0]
        return form(gather([self.outputs[i][1] for i in range(len(self.flows))]))


@dataclass(slots=True)
class LocalGraph:
    """The autograd graph of one task, between its forward and its backward."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    checkpoint: Checkpoint | None = None
    loss: Tensor | None = None
    ends: list[Tensor] = field(default_factory=list)
    """The outputs, cut off from the graph of the partition: where the graph of the loss begins."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Where each layer begins."""
    rest: RestOfBackward | None = None
    """What a split backward leaves for the weights."""

    def kept(self, target: Any = None) -> Kept:
        """Return what the task keeps for its backward; ``target`` is that of the loss."""
        return Kept([*self.leaves, *tensors_in(target)], [*self.outputs, self.loss])
