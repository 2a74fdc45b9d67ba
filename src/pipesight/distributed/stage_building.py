"""Build the stages of this rank: cut its partitions out of the model, initialise them, and make replicas equal."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.rank_initialisation import Recipe
from pipesight.distributed.replicas import Averaging, make_alike, make_replicas
from pipesight.distributed.shapes import Skeleton
from pipesight.distributed.stage import Stage
from pipesight.pipeline.batchnorm import DeferredBatchNorm
from pipesight.pipeline.partition import Partition
from pipesight.schedule.supported_schedules import RankSchedule

__all__ = ["learned_with", "make_stages"]


def make_stages(
    module: nn.Sequential,
    recipe: Recipe | None,
    skeleton: Skeleton,
    kind: RankSchedule,
    mesh: PipelineMesh,
    *,
    deferred_batch_norm: bool,
    data_parallel: str,
) -> list[Stage]:
    """Return the stages of this rank, in the order of partitions.

    ``recipe`` initialises layers that have no weights yet; the ``skeleton`` is the model without memory, cut into
    partitions.
    """
    sizes = [len(outline) for outline in skeleton.partitions]
    layers = list(module.named_children())
    stages = []
    for j in kind.partitions_of(mesh.position, mesh.length, len(sizes)):
        start = sum(sizes[:j])
        mine = layers[start : start + sizes[j]]
        if recipe is not None:
            recipe.materialise(mine, mesh.device)
        partition = Partition(OrderedDict(mine))
        if deferred_batch_norm:
            DeferredBatchNorm.convert(partition)
        partition.to(mesh.device)
        partition.training = module.training
        averaging = make_replicas(partition, mesh, data_parallel)
        stage = Stage(partition, j, len(sizes), routes=skeleton.routes, device=mesh.device, group=mesh.pipeline_group)
        stage.averaging = averaging
        stages.append(stage)
    return stages


def learned_with(module: nn.Sequential, loss_fn: Any, last: Stage, mesh: PipelineMesh, data_parallel: str) -> nn.Module:
    """Return what this rank trains and saves: its layers, and on the last rank a ``loss_fn`` with parameters."""
    if not isinstance(loss_fn, nn.Module) or not any(p.requires_grad for p in loss_fn.parameters()):
        return module
    if "loss_fn" in dict(module.named_children()):
        raise ValueError(
            "loss_fn has parameters, which are saved as 'loss_fn.*', but a layer has that name; rename the layer"
        )
    if data_parallel == "fsdp" and len(mesh.pipelines) > 1:
        raise ValueError(
            "loss_fn has parameters, which data_parallel='fsdp' does not shard, and an optimizer cannot mix sharded "
            "and whole parameters; use data_parallel='ddp', or move them into a layer"
        )
    if not last.is_last:
        return module
    loss_fn.to(mesh.device)
    if len(mesh.pipelines) > 1:
        make_alike(loss_fn, mesh)
        last.averaging = Averaging(nn.ModuleList([last.submod, loss_fn]), mesh)
    return nn.Sequential(OrderedDict([*module.named_children(), ("loss_fn", loss_fn)]))
