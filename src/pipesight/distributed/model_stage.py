"""The tasks of one partition of any model on a rank: what `stage` does for layers, done by calls of the model.

What crosses a cut is known by the plan of the micro-batch. A tensor that later partitions use, too, is passed on, and
its gradients are added on the way back. ::

    cut     a    b    c                     gradients of a, b, c
            │    │    │                              ^
          [ uses a, b  │ ] makes d          a: here; b: here and from later partitions; c: from later ones
                 │    │    │                         │
    cut          b    c    d                gradients of b, c, d
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipesight._nested import tensors_in
from pipesight._torch.loss_graph import LossPart, loss_parts
from pipesight.context import Kept, Unrepeatable
from pipesight.distributed.minibatch import MiniBatch
from pipesight.distributed.model_plan import Crossing, Plan
from pipesight.distributed.model_walk import Doors, ModelCall, Name, whole_output
from pipesight.distributed.part_walk import PartWalk, run_part
from pipesight.distributed.recomputing_layers import RecomputingLayers
from pipesight.distributed.target_counts import weighed_apart
from pipesight.distributed.transfers import TransferringStage
from pipesight.pipeline.checkpoint import Buffers
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.loss_watch import LossWatch
from pipesight.pipeline.partition import Partition
from pipesight.pipeline.split_backward import RestOfBackward, run_backward, run_input_backward
from pipesight.pipeline.unit_checkpoint import UnitCheckpoint
from pipesight.pipeline.units import is_repeated

__all__ = ["ModelBatch", "ModelParts", "ModelStage"]


@dataclass(slots=True)
class ModelBatch(MiniBatch):
    """A mini-batch of calls of a model."""

    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    """The arguments of each micro-batch."""
    run: ModelCall = whole_output
    """Calls the model, and makes of its output what is wanted of it."""
    with_loss: bool = True
    loss_parts: dict[int, Sequence[LossPart]] | None = None
    """What the losses are made of, if that is to be checked."""
    watches: Sequence[LossWatch] = ()
    """What to compute them under where they have no graphs."""
    factors: Sequence[Sequence[tuple[float, float]]] = ()
    """Where a loss adds means over different targets: how many targets each has, and what it is multiplied by."""
    results: dict[int, Any] = field(default_factory=dict)
    """What the last partition gives, where no loss is wanted."""


@dataclass(slots=True)
class ModelParts:
    """The model of a rank, for all its stages."""

    module: nn.Module
    """With the parameters of the rank; those of others have no memory."""
    doors: Doors
    cuts: Sequence[str]
    outlines: Mapping[str, nn.Module]
    """Its units without values, by name."""
    stand_ins: dict[int, Tensor] = field(default_factory=dict)
    """For parameters, by id."""
    repeatable: dict[str, tuple[nn.Module, Buffers]] = field(init=False)
    """The units that checkpointing runs again."""

    def __post_init__(self) -> None:
        units = {name: unit for name, unit in self.doors.units.items() if is_repeated(unit)}
        self.repeatable = {name: (unit, Buffers(unit)) for name, unit in units.items()}


@dataclass(slots=True)
class _Graph:
    """What a forward leaves for its backward."""

    leaves: dict[Name, Tensor]
    ends: dict[Name, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    marks: list[tuple[int, str]] = field(default_factory=list)
    units: list[UnitCheckpoint] = field(default_factory=list)
    """Those to run again."""
    kept_by_checkpoints: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Stand-ins that ``torch.utils.checkpoint`` calls units again with, by id, and what to call them with instead."""
    rest: RestOfBackward | None = None
    """What a split backward leaves for the weights."""

    def kept(self, call: Any = ()) -> Kept:
        """Return what the task keeps for its backward; ``call`` has the arguments of the model."""
        again = (t for unit in self.units for t in unit.arguments)
        inputs = [*self.leaves.values(), *tensors_in(call), *again]
        return Kept(inputs, [*self.ends.values(), self.loss], [unit.saved() for unit in self.units])


class ModelStage(TransferringStage):
    """A partition of this rank.

    ``units`` are those of the partition, for observers and their buffers.
    """

    def __init__(
        self,
        parts: ModelParts,
        units: Partition,
        j: int,
        partitions: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(units, j, partitions, device=device, group=group)
        self._parts = parts
        self._recomputing_layers = RecomputingLayers(units)
        self._graphs: dict[int, _Graph] = {}
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.is_first_of_rank = True
        self.batch: ModelBatch

    def begin(self, batch: MiniBatch, split: Sequence[bool]) -> None:
        """Prepare for a step; where the model changes arguments in place, each stage of the rank does so for itself."""
        super().begin(batch, split)
        pairs = zip(self.batch.calls, self.batch.flows, strict=True)
        self._calls = [call if self.is_first_of_rank or not plan.changes else _copied(call) for call, plan in pairs]

    def clear_runtime_states(self) -> None:
        """Drop what an earlier step, which may have failed, has left."""
        super().clear_runtime_states()
        self._graphs.clear()

    def _plan(self, i: int) -> Plan:
        plan: Plan = self.batch.flows[i]
        return plan

    # Forward.

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> list[Tensor]:
        """Run the partition on a micro-batch; return what goes to the next one."""
        i, batch, plan = fwd_chunk_id, self.batch, self._plan(fwd_chunk_id)
        came = [] if self.is_first else self._received.pop(i)
        arriving = dict(zip(plan.cuts[self.j].tensors, came, strict=True))
        for crossing, tensor in arriving.items():
            if self.has_backward and crossing.learns:
                tensor.requires_grad_()
        leaves = {crossing.name: t for crossing, t in arriving.items() if crossing.name in plan.needs[self.j]}
        checkpointed = self.has_backward and i < batch.where.checkpoint_stop
        self._start("forward", i, checkpointing=checkpointed)
        try:
            graph, made = self._forward(i, leaves, checkpointed)
            if self.has_backward:
                batch.where.kept = functools.partial(graph.kept, self._calls[i])
            going = self._going(plan.cuts[self.j + 1].tensors, made, arriving)
        except Unrepeatable:
            message = "a checkpointed model must not call current_microbatch(); use checkpoint='never'"
            error = RuntimeError(message)
            self._fail(error)
            raise error from None
        except BaseException as error:
            self._fail(error)
            raise
        self._end()
        if self.has_backward:
            graph.marks = batch.where.marks
            self._graphs[i] = graph
        self._sent[i] = [t.detach() for t in going]
        if self.is_last and save_forward_output:  # before torch 2.9, schedules put these together
            self.output_chunks.append(torch.empty(1))
        return self._sent[i]

    def _forward(self, i: int, leaves: dict[Name, Tensor], checkpointed: bool) -> tuple[_Graph, dict[Name, Tensor]]:
        """Call the model; return the graph, and what goes to later partitions."""
        parts, batch = self._parts, self.batch
        walk = PartWalk(
            self._plan(i),
            self.j,
            {name: _entered(t) if t.requires_grad else t for name, t in leaves.items()},
            parts.stand_ins,
            parts.doors.units,
            parts.outlines,
            parts.repeatable if checkpointed else {},
            cuts=parts.cuts,
            device=self.device,
            i=i,
            randomness=batch.randomness,
        )
        watch = batch.watches[i] if batch.watches and self.is_last else contextlib.nullcontext()
        try:
            with watch:
                result = run_part(walk, parts.doors, parts.module, self._calls[i], batch.run)
        finally:
            walk.end_stream()
        ends = {name: t for name, t in walk.made.items() if t.requires_grad}
        graph = _Graph(leaves, ends, units=walk.checkpoints, kept_by_checkpoints=walk.kept_by_checkpoints)
        graph.loss = self._finish(i, result)
        return graph, walk.made

    def _going(
        self, crossings: Sequence[Crossing], made: Mapping[Name, Tensor], arriving: Mapping[Crossing, Tensor]
    ) -> list[Tensor]:
        """Return what goes to the next partition, after a check that it is what was planned."""
        passing = {crossing.name: tensor for crossing, tensor in arriving.items()}
        going = []
        for crossing in crossings:
            tensor = made.get(crossing.name, passing.get(crossing.name))
            if tensor is None:
                raise RuntimeError(f"a tensor of partition {self.j} that later ones use was not made: {crossing.name}")
            if (tuple(tensor.shape), tensor.dtype) != (crossing.shape, crossing.dtype):
                found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise RuntimeError(
                    f"what partition {self.j} sends must have the shape that was found out without values: {crossing}, "
                    f"but has {found}; shapes must not depend on the values of activations"
                )
            if self.has_backward and tensor.requires_grad and not crossing.learns:
                raise RuntimeError(
                    f"what partition {self.j} sends ({crossing}) requires grad, but did not without values; use "
                    "detach() if no gradient is meant to flow through it"
                )
            going.append(tensor)
        return going

    def _finish(self, i: int, result: Any) -> Tensor | None:
        """Take the loss, or keep the result if none is wanted; return where the backward starts."""
        if not self.is_last:
            return None
        if not self.batch.with_loss:
            self.batch.results[i] = result
            return None
        batch, parts = self.batch, None
        if batch.loss_parts is not None and batch.watches:
            parts = batch.watches[i].parts(result)
        elif batch.loss_parts is not None and result.grad_fn is not None:
            parts = loss_parts(result)
        value = weighed_apart(parts, batch.factors[i]) if parts is not None and batch.factors else None
        if value is None and parts is not None and batch.loss_parts is not None:
            batch.loss_parts[i] = parts  # to be checked
        return batch.loss.add(i, result.reshape(()), (tuple, []), value)

    # Backward.

    def recompute(self, i: int) -> None:
        """Run the checkpointed units of a micro-batch again, if there are any and that was not done."""
        graph = self._graphs.get(i)
        if graph is None or not graph.units:
            return
        self._start("recompute", i)
        try:
            for unit in graph.units:  # a split backward goes twice through what they save
                unit.recompute(keep=self.split[i])
        except BaseException as error:
            self._fail(error)
            raise
        self.batch.where.kept = graph.kept
        self._end()
        graph.units = []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a micro-batch, or only the part that the partition before waits for."""
        if not self.has_backward:
            return
        i, plan = bwd_chunk_id, self._plan(bwd_chunk_id)
        self.recompute(i)
        graph = self._graphs.pop(i)
        came: Sequence[Tensor | None] = [] if self.is_last else self._gradients_received.pop(i)
        gradients = dict(zip((crossing.name for crossing in plan.cuts[self.j + 1].tensors), came, strict=True))
        self._start("backward", i, marks=graph.marks)
        try:
            pairs = [(graph.ends[name], g) for name, g in gradients.items() if name in graph.ends and g is not None]
            if graph.loss is not None and graph.loss.requires_grad:
                pairs.append((graph.loss, torch.ones_like(graph.loss)))
            ends, given = [end for end, _ in pairs], [gradient for _, gradient in pairs]
            with self._running_backward(i), self._parts.doors.swapping(graph.kept_by_checkpoints):
                if full_backward or self._recomputing_layers.in_graph(ends):
                    run_backward(ends, given)
                else:
                    with self._recomputing_layers.noticed(self.j):
                        graph.rest = run_input_backward(ends, given, list(graph.leaves.values()))
                        self.batch.where.gradients = graph.rest.waiting
            self.batch.where.end_layer()  # the rest belongs to no layer
        except BaseException as error:
            self._fail(error)
            raise
        self._end()
        sent: list[Tensor | None] = []
        for crossing in plan.cuts[self.j].tensors:
            leaf, passed = graph.leaves.get(crossing.name), gradients.get(crossing.name)
            own = None if leaf is None else leaf.grad
            sent.append(passed if own is None else own if passed is None else own + passed)
        self._gradients_sent[i] = sent
        if not full_backward:
            graph.ends, graph.loss = {}, None
            self._graphs[i] = graph

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of a backward: the gradients of the weights."""
        if not self.has_backward:
            return
        graph = self._graphs.pop(bwd_chunk_id)
        self._start("weight", bwd_chunk_id, marks=graph.marks)
        try:
            self._run_rest(bwd_chunk_id, graph.rest)
        except BaseException as error:
            self._fail(error)
            raise
        self._end()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: stages of a rank may share parameters, whose gradients are reduced when all have ended."""


def _copied(call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    flat = flatten(call)
    copies: tuple[tuple[Any, ...], dict[str, Any]] = flat.rebuild([tensor.clone() for tensor in flat.tensors])
    return copies


def _entered(tensor: Tensor) -> Tensor:
    entered: Tensor = _Entered.apply(tensor)  # type: ignore[no-untyped-call]
    return entered


class _Entered(torch.autograd.Function):
    """The same tensor, but no leaf, so that a model may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
