"""Build the pipeline of an ``nn.Sequential`` on one rank: its skeleton, the layers of this rank, its stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pipesight.distributed.agreement import LAYERS, Message
from pipesight.distributed.failures import RankMonitor
from pipesight.distributed.loss_weights import LossFunction, LossWeights
from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.model_building import build_model, keep_layers
from pipesight.distributed.rank_initialisation import Recipe
from pipesight.distributed.shapes import Skeleton
from pipesight.distributed.stage_building import learned_with, make_stages
from pipesight.distributed.step_inputs import StepInputs
from pipesight.distributed.step_runner import ScheduleRunner, StepRunner
from pipesight.pipeline.loss_merging import LossWeight
from pipesight.pipeline.partition import Partition, verify_sequential
from pipesight.pipeline.skip import verify_skippables
from pipesight.schedule.argument_checks import check_balance
from pipesight.schedule.supported_schedules import RankSchedule

__all__ = ["LayerPipeline"]


class LayerPipeline:
    """What a rank has of a model that is cut by numbers of layers."""

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        balance: Sequence[int],
        kind: RankSchedule,
        mesh: PipelineMesh,
        *,
        loss_fn: LossFunction,
        loss_weight: LossWeight | None,
        deferred_batch_norm: bool,
        data_parallel: str,
    ) -> None:
        self._kind, self._mesh = kind, mesh
        self._loss_fn, self._loss_weights = loss_fn, LossWeights(loss_fn, loss_weight)
        self._deferred_batch_norm, self._data_parallel = deferred_batch_norm, data_parallel
        self._recipe: Recipe | None = None
        if not isinstance(module, nn.Module):

            def free(built: nn.Module) -> None:
                if isinstance(built, nn.Sequential):
                    keep_layers(built, self._layers_of(balance, len(built)))

            module, self._recipe = build_model(module, free, first=dist.get_rank() == 0)
        verify_sequential(module)
        assert isinstance(module, nn.Sequential)
        verify_skippables(module)
        self._whole = module
        self.balance = check_balance(list(balance), len(module))

    def start(self, monitor: RankMonitor) -> None:
        """Make the stages of this rank."""
        whole = self._whole
        self.skeleton = Skeleton(whole, self.balance, self._mesh.device)
        with monitor.explaining("other replicas to start"):
            self.stages = make_stages(
                whole,
                self._recipe,
                self.skeleton,
                self._kind,
                self._mesh,
                deferred_batch_norm=self._deferred_batch_norm,
                data_parallel=self._data_parallel,
            )
        self.module = nn.Sequential(
            OrderedDict(child for stage in self.stages for child in stage.submod.named_children())
        )
        self.module.training = whole.training
        self._learned = learned_with(self.module, self._loss_fn, self.stages[-1], self._mesh, self._data_parallel)
        del self._whole, self._recipe

    def runner(self, chunks: int, *settings: Any) -> StepRunner:
        """Return what makes the calls; ``settings`` are those of `CallRunner`, from the agreement on."""
        inputs = StepInputs(self.skeleton, self._mesh, self._kind, chunks, self._loss_weights)
        schedule_runner = ScheduleRunner(self._kind, self.stages, self._mesh.length)
        self._runner = StepRunner(inputs, self.module, self._mesh, schedule_runner, *settings)
        return self._runner

    def arguments(self) -> Message:
        """Return what all ranks must have in common."""
        return {"balance": self.balance, LAYERS: self.skeleton.fingerprint()}

    def _layers_of(self, balance: Sequence[int], count: int) -> set[int]:
        """Return the indices of the layers of this rank, given how many layers there are."""
        sizes = check_balance(list(balance), count)
        mine = self._kind.partitions_of(self._mesh.position, self._mesh.length, len(sizes))
        return {k for j in mine for k in range(sum(sizes[:j]), sum(sizes[: j + 1]))}

    def outlines(self) -> list[Partition]:
        """Return all partitions, with tensors that have a shape but no memory."""
        return list(self.skeleton.partitions)

    def learned(self) -> nn.Module:
        """Return what this rank trains and saves."""
        return self._learned

    def train(self, mode: bool) -> None:
        """Set the mode of all layers."""
        self._learned.train(mode)
        self.module.train(mode)
        for stage in self.stages:
            stage.submod.train(mode)
        self.skeleton.train(mode)

    def loss(
        self,
        pipeline: Any,
        call: str,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        learns: bool,
        scale: float | None,
        everywhere: bool,
    ) -> Tensor | None:
        """Run a step; return its loss."""
        batch = self._runner.run(pipeline, call, _pair(*given[0], **given[1]), learns=learns, scale=scale)
        return self._runner.loss(batch, everywhere=everywhere)

    def predict(self, pipeline: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return the output of the model on the last rank."""
        pair = (_lone(*given[0], **given[1]), None)
        batch = self._runner.run(pipeline, "predict", pair, learns=False, with_target=False)
        return batch.output() if self.stages[-1].is_last else None


def _pair(input: Any = None, target: Any = None) -> tuple[Any, Any]:
    return input, target


def _lone(input: Any = None) -> Any:
    return input
