"""The mesh of ranks: pipelines, their replicas, and the process groups between them.

With two dimensions, each column is a pipeline, and each row holds the replicas of the same partitions::

                 replica 0   replica 1
    partition 0      0           1
    partition 1      2           3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["PipelineMesh"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of losses


class PipelineMesh:
    """The ranks of all pipelines, and the position of this one.

    The ``mesh`` has one dimension, or two, named ``pp`` and ``dp``; without one, all ranks are in one pipeline.
    ``timeout`` is how many seconds a rank waits for another; by default as long as the process group says.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout: float | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "there is no process group; start the program with torchrun, and call "
                "pipesight.distributed.init_process_group() first"
            )
        self.mesh = mesh if mesh is not None else init_device_mesh(_device_type(), (dist.get_world_size(),))
        ranks = self.mesh.mesh
        names = self.mesh.mesh_dim_names
        if ranks.dim() > 2 or (names is not None and not {"pp", "dp"}.issuperset(names)):
            raise ValueError(
                "mesh must have one dimension, or two named 'pp' and 'dp' "
                f"(shape: {tuple(ranks.shape)}, names: {names}); "
                'init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))'
            )
        if ranks.dim() == 1:
            ranks = ranks.unsqueeze(0 if names == ("dp",) else 1)
        elif names == ("dp", "pp"):
            ranks = ranks.t()
        self.pipelines: list[list[int]] = ranks.t().tolist()
        """The ranks of each pipeline, in order of partitions."""
        everyone: list[int] = sorted(ranks.flatten().tolist())
        me = dist.get_rank()
        found = [(k, pipeline) for k, pipeline in enumerate(self.pipelines) if me in pipeline]
        if not found:
            raise ValueError(f"rank {me} is not in the mesh (ranks: {everyone})")
        self.replica, self.members = found[0]
        """Which of the pipelines this rank is in, and its ranks."""
        self.position = self.members.index(me)
        """Which rank of its pipeline this one is."""
        self.length = len(self.members)
        self.device = torch.device("cpu")
        if self.mesh.device_type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.pipeline_group = _group(self.members, timeout)
        if self.device.type == "cuda":  # NCCL connects a group in the first call, in which all of its ranks must join
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.pipeline_group)
        self.replica_group = _group([pipeline[self.position] for pipeline in self.pipelines], timeout)
        self.control_group = _group(everyone, timeout, backend="gloo")

    def share_loss(self, loss: Tensor | None, *, everywhere: bool) -> Tensor | None:
        """Return the mean over replicas of the last partition's loss, there or everywhere."""
        if everywhere:
            shared = torch.zeros(3, dtype=torch.float64, device="cpu")
            if loss is not None:
                shared = torch.tensor([loss.item(), 1.0, _DTYPES.index(loss.dtype)], dtype=torch.float64, device="cpu")
            dist.all_reduce(shared, group=self.control_group)
            total, count, dtypes = shared.tolist()
            return torch.tensor(total / count, dtype=_DTYPES[round(dtypes / count)], device=self.device)
        if loss is not None and len(self.pipelines) > 1:
            dist.all_reduce(loss, group=self.replica_group)
            loss = loss / len(self.pipelines)
        return loss

    def total_norm(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients of all partitions."""
        norm = nn.utils.get_total_norm(gradients, norm_type)
        if hasattr(norm, "full_tensor"):  # sharded over the replicas
            norm = norm.full_tensor()
        dtype, norm = norm.dtype, norm.to(self.device, torch.float64)
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.pipeline_group)
            return norm.to(dtype)
        norm **= norm_type
        dist.all_reduce(norm, group=self.pipeline_group)
        return (norm ** (1 / norm_type)).to(dtype)


def _device_type() -> str:
    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"


def _group(ranks: list[int], timeout: float | None, backend: str | None = None) -> dist.ProcessGroup:
    limit = None if timeout is None else timedelta(seconds=timeout)
    group = dist.new_group(ranks, limit, backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
