"""Build the pipeline of any model on one rank: its outline, the parameters of this rank, its stages."""

from __future__ import annotations

import functools
import hashlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipesight._logger import own_logger
from pipesight._torch.module_internals import is_persistent
from pipesight.distributed.agreement import LAYERS, Message
from pipesight.distributed.dry_run import ModelOutline
from pipesight.distributed.failures import RankMonitor
from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.model_building import build_model
from pipesight.distributed.model_placement import Placement, named_tree
from pipesight.distributed.model_plan import Plan
from pipesight.distributed.model_stage import ModelParts, ModelStage
from pipesight.distributed.model_steps import ModelStepRunner
from pipesight.distributed.model_walk import Doors, whole_output
from pipesight.distributed.pretrained import read_tensors
from pipesight.distributed.rank_initialisation import Recipe, meta_tensors
from pipesight.distributed.replicas import Averaging, make_alike
from pipesight.distributed.step_runner import ScheduleRunner
from pipesight.pipeline.batch_dims import BatchDim, BatchDims
from pipesight.pipeline.batchnorm import DeferredBatchNorm
from pipesight.pipeline.partition import Partition
from pipesight.pipeline.randomness import PassRandomness
from pipesight.pipeline.step_losses import TARGET, LossOf
from pipesight.pipeline.units import check_cuts, find_units, guess_parts
from pipesight.schedule.supported_schedules import RankSchedule

__all__ = ["ModelPipeline"]

logger = own_logger(__name__)

_MISPLACED = 0.25
"""Of the weights: from here on it is worth a sample."""


class ModelPipeline:
    """What a rank has of a model that is cut at modules.

    The ``sample`` is of arguments of a call, to find out which partition uses which parameter; that is guessed without.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        cuts: Sequence[str],
        kind: RankSchedule,
        mesh: PipelineMesh,
        *,
        sample: tuple[Sequence[Any], dict[str, Any]] | None,
        loss_of: LossOf,
        loss_weight: Any,
        batch_dim: BatchDim,
        deferred_batch_norm: bool,
        data_parallel: str,
        verify: bool,
    ) -> None:
        if data_parallel == "fsdp" and len(mesh.pipelines) > 1:
            raise ValueError(
                "data_parallel='fsdp' shards the layers of an nn.Sequential; a model that is cut at modules may use "
                "weights outside the modules that have them, where they would be missing: use data_parallel='ddp'"
            )
        if callable(loss_weight) and loss_of.takes_target:
            raise TypeError(
                "over ranks, how much a loss counts must be known before outputs are, so with cuts and loss_fn "
                "loss_weight must not be a function; use 'samples' or 'sum', or let the model compute its loss"
            )
        if not (loss_weight is None or callable(loss_weight) or loss_weight in ("samples", "sum")):
            raise ValueError(
                f"loss_weight must be 'samples', 'sum' or a function of the arguments, but got {loss_weight!r}"
            )
        self._kind, self._mesh, self._loss_of, self._loss_weight = kind, mesh, loss_of, loss_weight
        self._to_verify = verify
        recipe: Recipe | None = None
        if not isinstance(module, nn.Module):
            module, recipe = build_model(module, lambda built: None, first=dist.get_rank() == 0)
        if not isinstance(module, nn.Module):
            raise TypeError(f"the function must return an nn.Module, but returned {type(module).__name__}")
        self.model = module
        self.cuts = check_cuts(module, cuts)
        if deferred_batch_norm:
            DeferredBatchNorm.convert(module)
        beside = (TARGET,) if loss_of.takes_target else ()
        self.dims = BatchDims(batch_dim, inspect.signature(module.forward), beside, module)
        self._recipe, self._sample = recipe, sample
        self._is_guess = sample is None  # which partition uses which parameter
        self._unit_names = list(find_units(module, self.cuts))
        self._guessed = guess_parts((name for name, _ in module.named_modules(remove_duplicate=False)), self.cuts)
        self.units = [[u for u in self._unit_names if self._guessed[u] == j] for j in range(len(self.cuts) + 1)]
        """Those of each partition, by name."""

    def start(self, monitor: RankMonitor) -> None:
        """Take the parameters of this rank, and make its stages."""
        module, recipe, mesh = self.model, self._recipe, self._mesh
        if recipe is not None:
            self._fill_buffers(recipe)
        self._move_buffers()
        self.outline = ModelOutline(module, self._unit_names, self.cuts, mesh.device)
        plan = None if self._sample is None else self._plan(self._sample)
        rank_of = functools.partial(self._kind.rank_of, ranks=mesh.length)
        self.placement = Placement(module, self._parts(plan), rank_of, mesh)
        if recipe is not None:
            self._fill_parameters(recipe)
        self.placement.hold()
        doors = Doors(module, self._unit_names, self.cuts)
        self.parts = ModelParts(module, doors, self.cuts, self.outline.doors.units)
        with monitor.explaining("other replicas to start"):
            self.stages = self._make_stages()
        self.adjust(plan)
        del self._recipe, self._sample

    def runner(self, chunks: int, *settings: Any) -> ModelStepRunner:
        """Return what makes the calls; ``settings`` are those of `CallRunner`, from the agreement on."""
        self._runner = ModelStepRunner(
            self.outline,
            self.placement,
            chunks,
            self.dims,
            self._loss_of,
            self._loss_weight,
            weakref.WeakMethod(self.adjust),  # this has the runner
            self.model,
            self._mesh,
            ScheduleRunner(self._kind, self.stages, self._mesh.length),
            *settings,
        )
        return self._runner

    def arguments(self) -> Message:
        """Return what all ranks must have in common."""
        tensors = [(name, list(p.shape), str(p.dtype)) for name, p in self.outline.module.named_parameters()]
        digest = hashlib.blake2b(repr(tensors).encode(), digest_size=8).hexdigest()
        return {"cuts": self.cuts, LAYERS: digest}

    @property
    def balance(self) -> list[int]:
        """How many units each partition has."""
        return [len(units) for units in self.units]

    @property
    def module(self) -> nn.Module:
        """The units of this rank, under their names in the model."""
        mine = {unit: self.parts.doors.units[unit] for stage in self.stages for unit in self.units[stage.j]}
        tree = named_tree({}, {}, mine)
        tree.training = self.model.training
        return tree

    def train(self, mode: bool) -> None:
        """Set the mode of all modules."""
        self.model.train(mode)

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
        if self._loss_of.takes_target:
            inputs, more, target = self._loss_of.apart(*given)
            given = tuple(inputs), {**more, TARGET: target}
        if self._to_verify and learns and self.model.training:
            self._to_verify = False
            last = self._rank_of(len(self.cuts))
            self._runner.verify(pipeline, given, self.placement, self._buffer_owners(), last)
        batch, _ = self._runner.run(pipeline, call, given, learns=learns, scale=scale)
        return self._runner.loss(batch, everywhere=everywhere)

    def predict(self, pipeline: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return the output of the model on the last rank."""
        batch, split = self._runner.run(pipeline, "predict", given, learns=False, with_loss=False)
        return self._runner.output(batch, split) if self.stages[-1].is_last else None

    # Who has what.

    def _rank_of(self, j: int) -> int:
        return self._kind.rank_of(j, self._mesh.length)

    def _plan(self, sample: tuple[Sequence[Any], dict[str, Any]]) -> Plan:
        args, kwargs = sample
        with torch.enable_grad():
            surroundings = self.outline.follow()
            random = PassRandomness({torch.device("cpu"): 0, self._mesh.device: 0})
            run = whole_output if self._loss_of.takes_target else self._loss_of.of_call  # there is no target
            return self.outline.plan((tuple(args), dict(kwargs)), run, surroundings, 0, random)

    def _parts(self, plan: Plan | None) -> dict[str, list[int]]:
        """Return the partitions that use each parameter, the owner's first."""
        parts: dict[str, list[int]] = {}
        first: dict[int, str] = {}
        for prefix, child in self.model.named_modules(remove_duplicate=False):
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    full = f"{prefix}.{key}" if prefix else key
                    parts.setdefault(first.setdefault(id(parameter), full), []).append(self._guessed[prefix])
        for name, guessed in parts.items():
            used = [] if plan is None else [j for j, names in enumerate(plan.parameters) if name in names]
            parts[name] = used or sorted(guessed)
        return parts

    def adjust(self, plan: Plan | None) -> None:
        """Take over from a plan what was only guessed before."""
        if plan is not None:
            if self._is_guess:
                self._is_guess = False
                self._warn_of_guess(plan)
            new = self.placement.adjust(plan.parameters)
            called = {unit for units in plan.units for unit in units}
            guessed = [[unit for unit in units if unit not in called] for units in self.units]
            units = [[*mine, *rest] for mine, rest in zip(plan.units, guessed, strict=True)]
            if new and self._mesh.position == self.placement.owner[new[0]]:
                logger.info("partitions share %s, of which ranks have copies", ", ".join(new))
            if units != self.units:
                self.units = units
                for stage in self.stages:
                    _fill(stage.submod, self.parts.doors.units, units[stage.j])
        self.parts.stand_ins = {
            id(mine): theirs
            for mine, theirs in zip(self.model.parameters(), self.outline.module.parameters(), strict=True)
        }

    def _warn_of_guess(self, plan: Plan) -> None:
        """Warn if it was guessed wrongly which rank needs much of the model: that rank has to send it in each step."""
        sizes = {name: tensor.numel() for name, tensor in self.outline.module.named_parameters()}
        users: dict[str, set[int]] = {}
        for j, names in enumerate(plan.parameters):
            for name in names:
                users.setdefault(name, set()).add(self._rank_of(j))
        wrong = sum(sizes[name] for name, ranks in users.items() if self.placement.owner[name] not in ranks)
        share = wrong / max(sum(sizes.values()), 1)
        if share > _MISPLACED and dist.get_rank() == 0:
            warnings.warn(
                f"{share:.0%} of the weights belong to ranks that do not use them: the model does not call its modules "
                "in the order in which it registers them; pass a call, sample=(args, kwargs), to place them where they "
                "are used",
                RuntimeWarning,
                stacklevel=2,
            )

    # Values.

    def _fill_buffers(self, recipe: Recipe) -> None:
        """Give all buffers, and tensors that are plain attributes, their initial values: every rank has them."""
        for name, child in self.model.named_modules():
            places = [place for place in meta_tensors(child) if place[0] is not child._parameters]
            found = recipe.values(f"{name} buffers", [tensor for _, _, tensor in places]) if places else {}
            for values, key, tensor in places:
                values[key] = found[id(tensor)]

    def _fill_parameters(self, recipe: Recipe) -> None:
        """Give the parameters of this rank their initial values; they depend on the seed and the module's name."""
        owned = set(self.placement.owned)
        for prefix, child in self.model.named_modules():
            names = {key: f"{prefix}.{key}" if prefix else key for key in child._parameters}
            mine = {
                key: p for key, p in child._parameters.items() if p is not None and names[key] in self.placement.aliases
            }
            if any(names[key] in owned for key in mine):
                found = recipe.values(prefix, list(mine.values()))
                for key, parameter in mine.items():
                    value = found[id(parameter)]
                    assert isinstance(value, nn.Parameter)
                    self.placement.put(names[key], value)

    def _move_buffers(self) -> None:
        for child in self.model.modules():
            for key, buffer in child._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    child._buffers[key] = buffer.to(self._mesh.device)

    # What others see.

    def _make_stages(self) -> list[ModelStage]:
        n, mesh = len(self.cuts) + 1, self._mesh
        stages = []
        for j in self._kind.partitions_of(mesh.position, mesh.length, n):
            partition = Partition()
            _fill(partition, self.parts.doors.units, self.units[j])
            stages.append(ModelStage(self.parts, partition, j, n, device=mesh.device, group=mesh.pipeline_group))
        for stage in stages[1:]:
            stage.is_first_of_rank = False
        if len(mesh.pipelines) > 1:
            held = nn.ParameterList(self.placement.held)
            make_alike(held, mesh)
            stages[0].averaging = _AveragingHeld(self.placement, mesh)
        return stages

    def outlines(self) -> list[Partition]:
        """Return all partitions, with tensors that have a shape but no memory."""
        partitions = [Partition() for _ in self.units]
        for partition, units in zip(partitions, self.units, strict=True):
            _fill(partition, self.outline.doors.units, units)
        return partitions

    def read(self, folder: str | PathLike[str]) -> None:
        """Read the values of this rank's parameters and saved buffers from safetensors files."""
        aliases = {alias: names for names in self.placement.aliases.values() for alias in names}
        tensors = dict(self.learned().state_dict())
        read_tensors(folder, tensors, aliases, str(getattr(self.model, "base_model_prefix", "")))

    def learned(self) -> nn.Module:
        """Return what this rank trains and saves, under the names of the model."""
        placement, position = self.placement, self._mesh.position
        parameters = {alias: placement.tensor(name) for name in placement.owned for alias in placement.aliases[name]}
        mine = [name for name, rank in self._buffer_owners().items() if rank == position]
        return named_tree(parameters, {name: self.model.get_buffer(name) for name in mine}, {})

    def _buffer_owners(self) -> dict[str, int]:
        """Return which rank of the pipeline keeps each buffer that is saved, by name."""
        part_of = {unit: j for j, units in enumerate(self.units) for unit in units}
        owners: dict[str, int] = {}
        for prefix, child in self.model.named_modules(remove_duplicate=False):
            j = next((part_of[unit] for unit in _parents(prefix) if unit in part_of), self._guessed[prefix])
            for key, buffer in child._buffers.items():
                if buffer is not None and is_persistent(child, key):
                    owners[f"{prefix}.{key}" if prefix else key] = self._rank_of(j)
        return owners


class _AveragingHeld(Averaging):
    """Averages the gradients of all parameters of a rank, copies among them, over its replicas."""

    def __init__(self, placement: Placement, mesh: PipelineMesh) -> None:
        super().__init__(nn.Module(), mesh)
        self._placement = placement

    def start(self) -> None:
        self._partition = nn.ParameterList(self._placement.held)
        super().start()


def _fill(partition: nn.Module, units: dict[str, nn.Module], names: Sequence[str]) -> None:
    """Make units the children of a partition, under their whole names."""
    partition._modules.clear()
    partition._modules.update({name: units[name] for name in names})


def _parents(name: str) -> list[str]:
    """Return a name and those of the modules around it, the innermost first.

    >>> _parents("a.b.c")
    ['a.b.c', 'a.b', 'a']
    """
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
