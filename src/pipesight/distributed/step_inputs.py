"""What is in the batch of a step, agreed on by all ranks: micro-batches, what they send, their weights, the seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipesight.distributed.agreement import Message
from pipesight.distributed.loss_weights import LossWeights
from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.shapes import Flow, Meta, Skeleton, meta_of
from pipesight.pipeline.microbatch import Form, as_tuple, form_of, lone, scatter
from pipesight.pipeline.randomness import draw_seed, next_seed, seed_of
from pipesight.schedule.packing import chunk_sizes
from pipesight.schedule.supported_schedules import RankSchedule

__all__ = ["StepInputs"]


class StepInputs:
    """Reads the batch of this rank, and finds out from the messages of all what is in theirs."""

    def __init__(
        self, skeleton: Skeleton, mesh: PipelineMesh, kind: RankSchedule, chunks: int, loss_weights: LossWeights
    ) -> None:
        self.skeleton, self.mesh, self._kind = skeleton, mesh, kind
        self._chunks, self.loss_weights = chunks, loss_weights
        self._partitions = len(skeleton.partitions)

    def read_input(self, input: Any, call: str, message: Message) -> list[tuple[Tensor, ...]]:
        """Return the micro-batches of the input, and add to ``message`` what other ranks must know."""
        if input is None:
            raise ValueError(f"the first rank needs the input: {call}(input, ...)")
        tensors = tuple(t.detach().to(self.mesh.device) for t in as_tuple(input, "input"))
        microbatches = scatter(tensors, self._chunks)
        flows = self._flows([[meta_of(t) for t in microbatch] for microbatch in microbatches], form_of(input))
        message["input"] = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
        message["lone"] = isinstance(input, Tensor)
        message["seed"], message["draws"] = next_seed(), any(flow.random for flow in flows)
        return microbatches

    def read_target(self, target: Any, call: str, message: Message) -> tuple[list[Any], list[float]]:
        """Return the micro-batches of the target and their weights, and add to ``message`` what other ranks must know.

        Weights that a function of the user's gives come later, by :meth:`weigh`.
        """
        if target is None:
            raise ValueError(f"the last rank needs the target: {call}(..., target)")
        tensors = tuple(t.detach().to(self.mesh.device) for t in as_tuple(target, "target"))
        message["target"] = tensors[0].size(0) if tensors and tensors[0].dim() else None
        form, pieces = form_of(target), scatter(tensors, self._chunks)
        targets = [form(piece) for piece in pieces]
        weights = self.loss_weights.by_target(targets, [piece[0].size(0) for piece in pieces])
        message["weight"] = sum(weights)
        return targets, weights

    def weigh(self, targets: list[Any], flows: list[Flow], message: Message) -> list[float]:
        """Return the weights that the user's function gives, and add to ``message`` what other ranks must know."""
        weights = self.loss_weights.by_function(targets, [flow.cuts[-1] for flow in flows])
        message["weight"] = sum(weights)
        return weights

    def share(self, messages: dict[int, Message]) -> float:
        """Return what the loss of a micro-batch of weight 1 is multiplied by; 0 if all weights are 0."""
        # Replicas are averaged by those who merge their gradients, so what they weigh makes up for that.
        replicas, everything = len(self.mesh.pipelines), sum(m.get("weight", 0.0) for m in messages.values())
        if self.loss_weights.sums:
            return float(replicas)
        return replicas / everything if everything else 0.0

    def agree(self, messages: dict[int, Message], with_target: bool, turn: tuple[int, int]) -> tuple[list[Flow], int]:
        """Return the micro-batches and the seed that follow from the messages of all ranks, the same on each.

        ``turn`` is how many training steps there were, and other passes since the last of them.
        """
        mesh = self.mesh
        modes = {rank: message["mode"] for rank, message in messages.items()}
        if len(set(modes.values())) > 1:
            raise ValueError(
                f"all ranks must be in the same mode ({modes}); call train() or eval(), and use autocast, on every rank"
            )
        n = self._partitions
        sizes = {}
        for pipeline in mesh.pipelines:
            first = pipeline[self._kind.rank_of(0, len(pipeline))]
            last = pipeline[self._kind.rank_of(n - 1, len(pipeline))]
            sizes[first] = messages[first]["input"][0][0][0]
            if with_target and messages[last]["target"] != sizes[first]:
                raise ValueError(
                    "input and target must have the same batch size "
                    f"(input on rank {first}: {sizes[first]}, target on rank {last}: {messages[last]['target']})"
                )
        first = mesh.members[self._kind.rank_of(0, mesh.length)]
        head = messages[first]
        metas = [Meta(tuple(shape), getattr(torch, dtype)) for shape, dtype in head["input"]]
        parts = chunk_sizes(sizes[first], self._chunks)
        flows = self._flows(
            [[Meta((size, *meta.shape[1:]), meta.dtype) for meta in metas] for size in parts],
            lone if head["lone"] else tuple,
        )
        return flows, self._seed(messages, head["seed"], turn)

    def _seed(self, messages: dict[int, Message], seed: int, turn: tuple[int, int]) -> int:
        """Return the seed of the pass, that of the first rank, and advance the generators of all ranks equally.

        So a ``DataLoader`` that shuffles gives the same samples on every rank. Where no forward of a layer draws,
        generators stay as they are, as the plain model leaves them: what a backward or the loss may still draw must not
        move that of one rank.
        """
        if any(message.get("draws") for message in messages.values()):
            draw_seed()
            return seed
        return seed_of(seed, *turn)

    def _flows(self, microbatches: list[list[Meta]], form: Form) -> list[Flow]:
        form = lone if form is lone else tuple
        return [self.skeleton.flow(metas, form) for metas in microbatches]
