"""Data parallelism: the replicas of a partition start equal, and their gradients are averaged once per step.

``ddp`` keeps every replica whole and averages its gradients; ``fsdp`` shards parameters, gradients and so the state of
optimizers over the replicas (PyTorch's ``fully_shard``). Losses are weighed so that the average is that of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from pipesight.distributed.mesh import PipelineMesh

__all__ = ["KINDS", "Averaging", "make_alike", "make_replicas"]

KINDS = ("ddp", "fsdp")

_BUCKET = 25 * 2**20  # bytes, as DDP's


def make_replicas(partition: nn.Module, mesh: PipelineMesh, kind: str) -> Averaging | None:
    """Make the replicas of a partition equal; return what averages their gradients, unless FSDP does."""
    if len(mesh.pipelines) == 1:
        return None
    make_alike(partition, mesh)
    if kind == "ddp":
        return Averaging(partition, mesh)
    replicas = DeviceMesh.from_group(mesh.replica_group, mesh.device.type)
    # Micro-batches follow each other at once, so what they all need stays.
    for layer in partition.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=replicas, reshard_after_forward=False)
    fully_shard(partition, mesh=replicas, reshard_after_forward=False)
    return None


def make_alike(module: nn.Module, mesh: PipelineMesh) -> None:
    """Broadcast the tensors of the first replica of a module to the others."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, mesh.pipelines[0][mesh.position], group=mesh.replica_group)


class Averaging:
    """Averages the gradients of a partition over its replicas, in the background while other partitions compute."""

    def __init__(self, partition: nn.Module, mesh: PipelineMesh) -> None:
        self._partition, self._group, self._count = partition, mesh.replica_group, len(mesh.pipelines)
        self._pending: list[tuple[Any, Tensor, list[nn.Parameter]]] | None = None

    def start(self) -> None:
        """Start to reduce the gradients, in buckets. A replica may lack a gradient that others have."""
        self._pending = []
        for bucket in _buckets([p for p in self._partition.parameters() if p.requires_grad]):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in bucket]
            there = torch.tensor([float(p.grad is not None) for p in bucket], dtype=gradients[0].dtype)
            flat = torch.cat([*(g.reshape(-1) for g in gradients), there.to(gradients[0].device)])
            self._pending.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, bucket))

    def finish(self) -> None:
        """Wait for the averages, and write them into ``.grad``."""
        if self._pending is None:  # older schedules do not start it
            self.start()
        assert self._pending is not None
        for work, flat, bucket in self._pending:
            work.wait()
            sizes = [p.numel() for p in bucket]
            *sums, there = flat.split([*sizes, len(bucket)])
            for parameter, total, count in zip(bucket, sums, there.tolist(), strict=True):
                if count:
                    average = total.view(parameter.shape).div_(self._count)
                    if parameter.grad is None:
                        parameter.grad = average.clone()
                    else:
                        parameter.grad.copy_(average)
        self._pending = None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype that fit into a bucket together."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        bucket: list[nn.Parameter] = []
        for parameter in (p for p in parameters if p.dtype == dtype):
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket
