"""Tensors between ranks: what torch's schedules post and wait for.

Each tensor goes as the bytes it consists of, so that every dtype can. An empty one is not sent at all: both sides know.
Where the transport is gloo, a wait tells observers of the transfer, and an error says which rank was waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

if TYPE_CHECKING:
    from pipesight.distributed.transfers import ConnectedStage

__all__ = ["receive_ops", "send_ops"]


def send_ops(stage: ConnectedStage, tensors: Sequence[Tensor], partition: int, i: int) -> list[dist.P2POp]:
    """Return what sends the tensors of micro-batch i to another partition."""
    return _ops(c10d.isend, stage, tensors, partition, i)


def receive_ops(stage: ConnectedStage, tensors: Sequence[Tensor], partition: int, i: int) -> list[dist.P2POp]:
    """Return what receives tensors of micro-batch i from another partition."""
    return _ops(c10d.irecv, stage, tensors, partition, i)


def _ops(
    operation: Callable[..., Any], stage: ConnectedStage, tensors: Sequence[Tensor], partition: int, i: int
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


def _enter(stage: ConnectedStage, i: int, peer: int) -> None:
    """Say where this rank is: at a micro-batch that comes from another rank, or goes there."""
    where = stage.batch.where
    where.partition, where.microbatch, where.device, where.peer = stage.j, i, stage.device, peer


class _Posting:
    """Posts a transfer, for `torch.distributed.batch_isend_irecv`."""

    __slots__ = ("__name__", "_i", "_peer", "_place", "_sends", "_stage")

    def __init__(self, sends: bool, stage: ConnectedStage, i: int, place: int, peer: int) -> None:
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
            raise stage.batch.watch.explain(error, f"rank {self._peer}") from None
        finally:
            stage.batch.where.peer = None
        return _Waiting(work, tensor, self._sends, stage, self._i, self._peer)


class _Waiting:
    """A transfer under way."""

    __slots__ = ("_i", "_peer", "_sends", "_stage", "_tensor", "_work")

    def __init__(self, work: Any, tensor: Tensor, sends: bool, stage: ConnectedStage, i: int, peer: int) -> None:
        self._work, self._tensor, self._sends = work, tensor, sends
        self._stage, self._i, self._peer = stage, i, peer

    def wait(self, *_: Any) -> bool:
        stage = self._stage
        batch = stage.batch
        batch.watch.waits_for = f"rank {self._peer}"
        _enter(stage, self._i, self._peer)
        observed = batch.observers.members and not self._sends
        if observed:
            details = (f"rank {self._peer}", f"rank {dist.get_rank()}", self._tensor.numel())
            batch.observers.transfer_started(batch.where, *details)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise batch.watch.explain(error, f"rank {self._peer}") from None
        finally:
            batch.where.peer = None
            if observed:
                batch.observers.transfer_ended(batch.where, *details)
        batch.watch.waits_for = None
        return True
