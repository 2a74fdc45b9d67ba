"""A stage and its neighbours: what a schedule has it receive before a task, and send after it.

::

    partition j - 1   ── output, skips ──>   partition j   ── output, skips ──>   partition j + 1
                      <──── gradients ────                 <──── gradients ────

A neighbour may be on another rank, or, where ranks have several partitions, on the same one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from pipesight.distributed.minibatch import Minibatch
from pipesight.distributed.shapes import Cut
from pipesight.distributed.transfer import receive_ops, send_ops
from pipesight.pipeline.partition import Partition

__all__ = ["ConnectedStage"]


class ConnectedStage(_PipelineStageBase):
    """A partition of this rank, without its tasks.

    Args:
        partition: Its layers.
        j: Which one it is.
        partitions: How many there are.
        device: Where it runs.
        group: The ranks of this pipeline.
    """

    batch: Minibatch

    def __init__(
        self, partition: Partition, j: int, partitions: int, *, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(partition, j, partitions, device, group)
        self.j = j
        self._warm = False
        self._received: dict[int, list[Tensor]] = {}
        self._gradients_received: dict[int, list[Tensor | None]] = {}
        self._sent: dict[int, list[Tensor]] = {}
        self._gradients_sent: dict[int, list[Tensor | None]] = {}

    def begin(self, batch: Minibatch) -> None:
        """Get ready for a step."""
        self.batch = batch
        self.clear_runtime_states()

    def _cut(self, i: int, *, before: bool = False) -> Cut:
        return self.batch.flows[i].cuts[self.j if before else self.j + 1]

    # What schedules call around the steps.

    def clear_runtime_states(self) -> None:
        """Forget what an earlier step, which may have failed, has left."""
        for state in (self._received, self._gradients_received, self._sent, self._gradients_sent):
            state.clear()
        self.output_chunks.clear()

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = {0: ()}

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Let NCCL connect to the neighbours, once, in an order that suits all; gloo needs no such thing."""
        backend = str(dist.get_backend(self.group))
        if self._warm or "nccl" not in backend:
            return []
        self._warm = True
        neighbours = {self.stage_index_to_group_rank.get(self.j + way) for way in (-1, 1)}
        if self.group_rank in neighbours or self.group_size == 1:
            return []
        return list(super()._get_init_p2p_neighbors_ops())

    # Where the neighbour is on another rank.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the input of a micro-batch."""
        if self.is_first:
            return []
        tensors = [meta.empty(self.device) for meta in self._cut(fwd_chunk_id, before=True).tensors]
        self._received[fwd_chunk_id] = tensors
        return receive_ops(self, tensors, self.j - 1, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the output of a micro-batch on."""
        tensors = self._sent.pop(fwd_chunk_id)
        return [] if self.is_last else send_ops(self, tensors, self.j + 1, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the gradients of an output."""
        if not self.has_backward or self.is_last:
            return []
        metas = self._cut(bwd_chunk_id).tensors
        gradients = [meta.empty(self.device) if meta.learns else None for meta in metas]
        self._gradients_received[bwd_chunk_id] = gradients
        return receive_ops(self, [g for g in gradients if g is not None], self.j + 1, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the gradients of an input back."""
        if not self.has_backward or self.is_first:
            return []
        gradients = self._gradients_sent.pop(bwd_chunk_id)
        metas = self._cut(bwd_chunk_id, before=True).tensors
        tensors = [
            meta.empty(self.device).zero_() if gradient is None else gradient
            for meta, gradient in zip(metas, gradients, strict=True)
            if meta.learns
        ]
        return send_ops(self, tensors, self.j - 1, bwd_chunk_id)

    # Where the neighbour is on the same rank.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the output of the partition before."""
        self._received[mb_index] = [t.detach() for t in prev_stage_outputs]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Give the gradients of the input."""
        return tuple(self._gradients_sent.pop(mb_index)) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the output."""
        if self.has_backward:
            self._gradients_received[mb_index] = list(next_stage_bwd_outputs)
