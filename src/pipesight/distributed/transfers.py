"""What a stage receives before a task and sends after it, to a neighbour on another rank or on the same one.

::

    partition j - 1   ── output, skips ──>   partition j   ── output, skips ──>   partition j + 1
                      <──── gradients ────                 <──── gradients ────

torch's schedules post the transfers and wait for them. Each tensor goes as the bytes it consists of, so that every
dtype can. An empty one is not sent at all: both sides know. With gloo, observers see each wait for a transfer, and an
error names the rank that was waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pipesight._torch.pipelining import PipelineStageBase
from pipesight.context import Observers, Phase
from pipesight.distributed.minibatch import MiniBatch
from pipesight.distributed.replicas import Averaging
from pipesight.pipeline.partition import Partition
from pipesight.pipeline.randomness import begin_task, end_task
from pipesight.pipeline.split_backward import RestOfBackward
from pipesight.pipeline.workers import annotate

__all__ = ["TransferringStage"]


class TransferringStage(PipelineStageBase):
    """A stage, as torch's schedules see it, without its tasks.

    Args:
        partition: Its layers.
        j: Which one it is.
        partitions: How many there are.
        device: Where it runs.
        group: The ranks of this pipeline.
    """

    sets_context = True
    """Tells recording, which sets the context for other stages of torch's schedules."""

    batch: MiniBatch
    split: Sequence[bool] = ()
    """For each micro-batch, whether the gradients of the weights are a task of their own."""

    def __init__(
        self, partition: Partition, j: int, partitions: int, *, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(partition, j, partitions, device, group)
        self.j = j
        self.averaging: Averaging | None = None
        """Of the gradients of its replicas, unless FSDP does it."""
        self._received: dict[int, list[Tensor]] = {}
        self._gradients_received: dict[int, list[Tensor | None]] = {}
        self._sent: dict[int, list[Tensor]] = {}
        self._gradients_sent: dict[int, list[Tensor | None]] = {}

    def begin(self, batch: MiniBatch, split: Sequence[bool]) -> None:
        """Prepare for a step."""
        self.batch, self.split = batch, split
        self.clear_runtime_states()

    def _cut(self, i: int, *, before: bool = False) -> Any:
        return self.batch.flows[i].cuts[self.j if before else self.j + 1]

    # What schedules call around the steps.

    def clear_runtime_states(self) -> None:
        """Drop what an earlier step, which may have failed, has left."""
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
        """Send nothing ahead: a mesh connects its ranks, and the order of messages cannot deadlock."""
        return []

    # Where the neighbour is on another rank.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the input of a micro-batch."""
        if self.is_first:
            return []
        tensors = [meta.empty(self.device) for meta in self._cut(fwd_chunk_id, before=True).tensors]
        self._received[fwd_chunk_id] = tensors
        return _ops(c10d.irecv, self, tensors, self.j - 1, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the output of a micro-batch on."""
        tensors = self._sent.pop(fwd_chunk_id)
        return [] if self.is_last else _ops(c10d.isend, self, tensors, self.j + 1, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the gradients of an output."""
        if not self.has_backward or self.is_last:
            return []
        metas = self._cut(bwd_chunk_id).tensors
        gradients = [meta.empty(self.device) if meta.learns else None for meta in metas]
        self._gradients_received[bwd_chunk_id] = gradients
        return _ops(c10d.irecv, self, [g for g in gradients if g is not None], self.j + 1, bwd_chunk_id)

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
        return _ops(c10d.isend, self, tensors, self.j - 1, bwd_chunk_id)

    # Where the neighbour is on the same rank.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the output of the previous partition."""
        self._received[mb_index] = [t.detach() for t in prev_stage_outputs]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input."""
        return tuple(self._gradients_sent.pop(mb_index)) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the output."""
        if self.has_backward:
            self._gradients_received[mb_index] = list(next_stage_bwd_outputs)

    def reshard(self) -> None:
        """Free what FSDP has gathered: without a backward, it would keep weights that an optimizer has changed."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # The context.

    def _start(
        self, phase: Phase, i: int, *, checkpointing: bool = False, marks: list[tuple[int, str]] | None = None
    ) -> None:
        token = self.batch.tokens[i]
        self.batch.where.begin_task(phase, self.j, i, self.device, token, checkpointing=checkpointing, marks=marks)

    def _end(self) -> None:
        where = self.batch.where
        if self.batch.observers.members:
            self.batch.observers.task_ended(where)
        where.phase = None
        where.kept = where.gradients = None  # they hold tensors

    def _fail(self, error: BaseException) -> None:
        annotate(error, self.batch.where)
        self._end()

    @contextlib.contextmanager
    def _running_backward(self, i: int, part: str = "backward") -> Iterator[None]:
        """Let layers draw from the random stream of the task, and let hooks see the context."""
        begin_task(self.batch.randomness, (i, self.j, part))
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            end_task()

    def _run_rest(self, i: int, rest: RestOfBackward | None) -> None:
        """Run what a split backward has left for later."""
        if rest is None:
            return
        where = self.batch.where
        with self._running_backward(i, "backward" if rest.is_whole else "weight"):
            whole = rest.is_whole
            if not whole:
                where.observers = Observers(())  # weights come one after the other, in no order of layers
            try:
                rest.run()
            finally:
                where.observers = self.batch.observers
            if whole:
                where.end_layer()


def _ops(
    operation: Callable[..., Any], stage: TransferringStage, tensors: Sequence[Tensor], partition: int, i: int
) -> list[dist.P2POp]:
    peer = stage.stage_index_to_group_rank[partition]
    ops = []
    for tensor in tensors:
        if tensor.numel():
            op = dist.P2POp(operation, _bytes(tensor), group=stage.group, group_peer=peer)
            if tensor.device.type == "cpu":
                # Checked when it was made; from here on torch only calls it.
                op.op = _Posting(operation is c10d.isend, stage, i, peer, op.peer)
            ops.append(op)
    return ops


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _enter(stage: TransferringStage, i: int, peer: int) -> None:
    """Set the context to a micro-batch that is received from, or sent to, another rank."""
    where = stage.batch.where
    where.partition, where.microbatch, where.device, where.peer = stage.j, i, stage.device, peer


class _Posting:
    """Posts a transfer, for `torch.distributed.batch_isend_irecv`."""

    __slots__ = ("__name__", "_i", "_peer", "_place", "_sends", "_stage")

    def __init__(self, sends: bool, stage: TransferringStage, i: int, place: int, peer: int) -> None:
        self.__name__ = "isend" if sends else "irecv"
        self._sends, self._stage, self._i, self._place, self._peer = sends, stage, i, place, peer

    def __call__(self, tensor: Tensor, *_: Any, **__: Any) -> _Waiting:
        stage, peer = self._stage, self._place
        _enter(stage, self._i, self._peer)
        try:
            if self._sends:
                work = dist.isend(tensor, group=stage.group, group_dst=peer)
            else:
                work = dist.irecv(tensor, group=stage.group, group_src=peer)
        except RuntimeError as error:
            raise stage.batch.monitor.explain(error, f"rank {self._peer}") from None
        finally:
            stage.batch.where.peer = None
        return _Waiting(work, tensor, self._sends, stage, self._i, self._peer)


class _Waiting:
    """A transfer under way."""

    __slots__ = ("_i", "_peer", "_sends", "_stage", "_tensor", "_work")

    def __init__(self, work: Any, tensor: Tensor, sends: bool, stage: TransferringStage, i: int, peer: int) -> None:
        self._work, self._tensor, self._sends = work, tensor, sends
        self._stage, self._i, self._peer = stage, i, peer

    def wait(self, *_: Any) -> bool:
        stage = self._stage
        batch = stage.batch
        batch.monitor.presence.waits_for = f"rank {self._peer}"
        _enter(stage, self._i, self._peer)
        observed = batch.observers.members and not self._sends
        if observed:
            details = (f"rank {self._peer}", f"rank {dist.get_rank()}", self._tensor.numel())
            batch.observers.transfer_started(batch.where, *details)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise batch.monitor.explain(error, f"rank {self._peer}") from None
        finally:
            batch.where.peer = None
            if observed:
                batch.observers.transfer_ended(batch.where, *details)
        batch.monitor.presence.waits_for = None
        return True
