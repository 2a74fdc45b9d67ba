"""What one task works on: a partition, its inputs, and an autograd graph of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipesight.pipeline.aliasing import Region
from pipesight.pipeline.autograd_node import edge_of, enter
from pipesight.pipeline.checkpoint import Buffers, SavedBuffers
from pipesight.pipeline.gradients import run_graph
from pipesight.pipeline.microbatch import Form
from pipesight.pipeline.partition import Partition, SkipRoutes
from pipesight.pipeline.randomness import SavedGenerators
from pipesight.pipeline.skip import SkipKey, skip_keys

__all__ = ["Checkpoint", "Graph", "Inputs", "Stage"]

Edges: TypeAlias = list[GradientEdge | None]


class Stage:
    """A partition on its device, and what the engine has learned about it."""

    def __init__(self, j: int, partition: Partition, device: torch.device, routes: SkipRoutes) -> None:
        self.j = j
        self.partition = partition
        self.device = device
        self.arriving = routes.arriving[j]
        self.leaving = routes.leaving[j]
        self.skips = any(skip_keys(partition))
        self.buffers = Buffers(partition)
        self.repeatable = True  # no layer has asked for `current_microbatch`
        self._strangers: list[weakref.ref[Tensor]] = []
        self.new = True  # no mini-batch has come through yet
        self.changes_input = False  # a layer may change what comes in
        self.leaves_input = False  # it has been seen not to
        self.phony = torch.empty(0, device="cpu", requires_grad=True)

    def trainable(self) -> list[Tensor]:
        """Return the tensors that get gradients here: parameters, and what `meet_strangers` found."""
        self._strangers = [ref for ref in self._strangers if ref() is not None]
        strangers = [t for ref in self._strangers if (t := ref()) is not None]
        return [t for t in (*self.partition.parameters(), *strangers) if t.requires_grad]

    def check_weights(self, weights: list[Tensor], versions: list[int]) -> None:
        """Raise if the tensors that got gradients here, `trainable` at forward, are not what they were."""
        if [weight._version for weight in weights] != versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "parameter of a checkpointed partition, after its forward; call optimizer.step() after backward()"
            )
        now = {*self.partition.parameters(), *self.trainable()}
        if any(weight not in now for weight in weights):
            raise RuntimeError(
                "a parameter of a checkpointed partition has been replaced between forward and backward, for example "
                "by torch.func.functional_call; use checkpoint='never'"
            )

    @property
    def has_strangers(self) -> bool:
        """Whether `meet_strangers` ever found any."""
        return bool(self._strangers)

    def meet_strangers(self, graph: Graph, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Remember the leaves that a layer uses although they are no parameters of its partition; return new ones."""
        known = {*graph.parameters, *self.partition.parameters()}
        strangers = [leaf for leaf in leaves if leaf not in known]
        self._strangers += [weakref.ref(leaf) for leaf in strangers]
        graph.parameters += strangers
        return strangers


@dataclass(slots=True)
class Inputs:
    """What goes into a task: tensors from the partition before, then skips from earlier ones."""

    tensors: list[Tensor | None]
    needed: list[bool]  # which of them want a gradient
    count: int  # how many come from the partition before
    form: Form  # makes of those what the first layer takes
    regions: list[Region | None]  # where they came from, unless they are part of a graph

    def versions(self) -> list[int | None]:
        """Return a number for each tensor that changes when it is changed in place."""
        return [None if t is None or t.is_inference() else t._version for t in self.tensors]

    def safe_from(self, stage: Stage, storages: set[int] | None = None) -> Inputs:
        """Return inputs that the partition may change: copies, if a layer would.

        Given ``storages``, by address, only tensors in these are copied.
        """
        if not stage.changes_input:
            return self
        copies = [
            t.clone() if t is not None and (storages is None or t.untyped_storage().data_ptr() in storages) else t
            for t in self.tensors
        ]
        return Inputs(copies, self.needed, self.count, self.form, self.regions)


@dataclass(slots=True)
class Checkpoint:
    """What it takes to run a task again."""

    inputs: Inputs
    versions: list[int | None]
    buffers: SavedBuffers
    generators: SavedGenerators

    def check(self) -> None:
        """Raise if the inputs are not what they were."""
        if self.inputs.versions() != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                "input of a checkpointed partition, after its forward; clone() it first, or use checkpoint='never'"
            )


@dataclass(slots=True)
class Graph:
    """The local graph of a task: its two ends, and what it takes to build it where the first forward did not.

    Usually it spans one partition. Once a layer has called `current_microbatch`, tensors may bypass the engine; then
    the partitions from there to the last share one graph, and the last one's worker runs all of its backward.
    """

    first: int  # the partition whose inputs `ins` are
    ins: Edges = field(default_factory=list)
    arriving: list[tuple[SkipKey, GradientEdge]] = field(default_factory=list)
    anchors: list[Tensor | None] = field(default_factory=list)  # they keep `ins` and `arriving` valid
    parameters: list[Tensor] = field(default_factory=list)
    outs: Edges = field(default_factory=list)  # of the outputs, then of the skips that leave
    promised: list[bool] = field(default_factory=list)  # which of these others will send gradients for
    marks: list[tuple[int, str]] = field(default_factory=list)  # where each layer begins
    checkpoint: Checkpoint | None = None

    def begin(self, stage: Stage, inputs: Inputs, parameters: list[Tensor]) -> list[Tensor | None]:
        """Let the graph grow by a partition; return the inputs as its roots."""
        tensors, edges, anchor = enter(stage.phony, inputs.tensors, inputs.needed)
        if self.first == stage.j:
            self.ins, self.arriving, self.anchors, self.parameters = edges[: inputs.count], [], [], []
        if stage.arriving:
            skips = zip(stage.arriving, edges[inputs.count :], strict=True)
            self.arriving += [(key, edge) for key, edge in skips if edge is not None]
        self.anchors.append(anchor)
        self.parameters += parameters
        return tensors

    def end(self, outputs: list[Tensor | None]) -> None:
        """Note the outputs of the last partition it has grown by. Only their place in the graph, so they can go."""
        self.outs = [edge_of(t, self.anchors[-1]) for t in outputs]

    def backward(
        self, gradients: list[Tensor | None], *, retain: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs, of the skips that arrived, and of the parameters."""
        ends = [(e, g) for e, g in zip(self.outs, gradients, strict=True) if e is not None and g is not None]
        gradients.clear()
        if not ends:
            return [None] * len(self.ins), [None] * len(self.arriving), [None] * len(self.parameters)
        roots = [edge for edge in self.ins if edge is not None] + [edge for _, edge in self.arriving]
        # The caller may have frozen some since.
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        found: list[Tensor | None] = []
        if roots or parameters:
            found = run_graph(ends, [*roots, *parameters], retain=retain)
        of_roots = iter(found)
        of_ins = [None if edge is None else next(of_roots) for edge in self.ins]
        of_arriving = [next(of_roots) for _ in self.arriving]
        of_parameters = [next(of_roots) if parameter.requires_grad else None for parameter in self.parameters]
        return of_ins, of_arriving, of_parameters
