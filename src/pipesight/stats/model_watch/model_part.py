"""The part of a model that is on this rank, where others have replicas of it, and what of it counts there.

A `DistributedPipeline` is no module: each rank has the layers of its stage, and a part of the batch::

             replica 0   replica 1
    stage 0      0           1          activations of ranks 0 and 1 together are those of the whole batch,
    stage 1      2           3          and weights are the same on both, or sharded over them
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from pipesight.distributed import DistributedPipeline

__all__ = ["Model", "Part", "is_distributed", "part_of"]

Model: TypeAlias = Union[nn.Module, "DistributedPipeline"]
"""What can be watched."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a model.

    Attributes:
        module: Its layers.
        group: The ranks that have the same layers, if the model knows them.
        replicas: How many have them. Each has gradients so many times as large as those of the whole batch are.
        alike: Whether all of them have the whole of each weight.
        is_first: Whether this is the first of them.
    """

    module: nn.Module
    group: dist.ProcessGroup | None = None
    replicas: int = 1
    alike: bool = False
    is_first: bool = True

    def of_whole_batch(self, gradient: Tensor) -> Tensor:
        """Return what the gradient would be if the loss were that of the batch of all replicas."""
        if self.replicas == 1:
            return gradient
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / self.replicas


def is_distributed(model: object) -> bool:
    """Whether it is a `DistributedPipeline`. Nobody has one who has not imported it, which takes a while."""
    loaded = sys.modules.get("pipesight.distributed.pipeline")
    return loaded is not None and isinstance(model, loaded.DistributedPipeline)


def part_of(model: Model) -> Part:
    """Return what this rank has of a model."""
    if isinstance(model, nn.Module):
        return Part(model, alike=isinstance(model, nn.parallel.DistributedDataParallel))
    group = model.data_parallel_group
    replicas = dist.get_world_size(group)
    return Part(
        model.module,
        group,
        replicas,
        alike=replicas > 1 and model.data_parallel == "ddp",
        is_first=dist.get_rank(group) == 0,
    )
