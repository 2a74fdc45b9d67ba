"""The autograd graph of one task, cut off from all others at both ends.

The inputs of a task become roots of a graph of its own (`enter`); its outputs leave detached. What remains of both is
only where gradients go in and come out (`edge_of`), so the tensors themselves can be freed::

    inputs ──> enter ──> roots ──> layers ──> outputs ──> detach
                 │                                │
                ins  <── gradients ── LocalGraph ── outs
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipesight._torch.autograd import PythonNode, is_of_function
from pipesight.pipeline.aliasing import Region
from pipesight.pipeline.checkpoint import Checkpoint
from pipesight.pipeline.gradients import run_graph
from pipesight.pipeline.microbatch import Form
from pipesight.pipeline.partition import PlacedPartition

__all__ = ["Inputs", "LocalGraph", "edge_of", "leads_to_roots"]

Edges: TypeAlias = list[GradientEdge | None]


@dataclass(slots=True)
class Inputs:
    """What goes into a task: tensors from the partition before, then skips from earlier ones."""

    tensors: list[Tensor | None]
    needed: list[bool]  # which of them want a gradient
    count: int  # how many come from the partition before
    form: Form  # makes of those what the first layer takes
    regions: list[Region | None]  # their memory where they came from, if others may share it

    def safe_from(self, partition: PlacedPartition, storages: set[int] | None = None) -> Inputs:
        """Return inputs that the partition may change: copies, if a layer would.

        Given ``storages``, by address, only tensors in these are copied.
        """
        if not partition.changes_input:
            return self
        copies = [
            t.clone() if t is not None and (storages is None or t.untyped_storage().data_ptr() in storages) else t
            for t in self.tensors
        ]
        return Inputs(copies, self.needed, self.count, self.form, self.regions)


@dataclass(slots=True)
class LocalGraph:
    """The local graph of a task: its two ends, and what it takes to build it again if it is checkpointed.

    Usually it spans one partition. Once a layer has called `current_microbatch`, tensors may bypass the engine; then
    the partitions from there to the last share one graph, and the last one's worker runs all of its backward.
    """

    first: int  # the partition whose inputs `ins` are
    marks: list[tuple[int, str]] = field(default_factory=list)  # where each layer begins
    checkpoint: Checkpoint | None = None
    inputs: Inputs | None = None  # of the checkpoint
    # Set by `begin`:
    ins: Edges = field(init=False)
    arriving: list[tuple[Hashable, GradientEdge]] = field(init=False)  # skips, by key
    anchors: list[Tensor | None] = field(init=False)  # they keep `ins` and `arriving` valid
    parameters: list[Tensor] = field(init=False)
    # Set by `end`:
    outs: Edges = field(init=False)  # of the outputs, then of the skips that leave
    # Set by the forward pass:
    promised: list[bool] = field(init=False)  # which of these others will send gradients for

    def begin(self, partition: PlacedPartition, inputs: Inputs, parameters: list[Tensor]) -> list[Tensor | None]:
        """Extend the graph by a partition; return the inputs as its roots."""
        tensors, edges, anchor = enter(partition.phony, inputs.tensors, inputs.needed)
        if self.first == partition.j:
            self.ins, self.arriving, self.anchors, self.parameters = edges[: inputs.count], [], [], []
        if partition.arriving:
            skips = zip(partition.arriving, edges[inputs.count :], strict=True)
            self.arriving += [(key, edge) for key, edge in skips if edge is not None]
        self.anchors.append(anchor)
        self.parameters += parameters
        return tensors

    def end(self, outputs: list[Tensor | None]) -> None:
        """Note where the outputs of the last partition are in the graph."""
        self.outs = [edge_of(t, self.anchors[-1]) for t in outputs]

    def wanted(self) -> list[bool]:
        """Return which of the outputs want a gradient."""
        return [edge is not None for edge in self.outs]

    def backward(
        self, gradients: list[Tensor | None], *, retain: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs, of the skips that arrived, and of the parameters."""
        ends = [(e, g) for e, g in zip(self.outs, gradients, strict=True) if e is not None and g is not None]
        gradients.clear()
        skips = [edge for _, edge in self.arriving]
        # The caller may have frozen parameters since.
        all_inputs = [*self.ins, *skips, *[p if p.requires_grad else None for p in self.parameters]]
        inputs = [one for one in all_inputs if one is not None]
        if not ends or not inputs:
            return [None] * len(self.ins), [None] * len(skips), [None] * len(self.parameters)
        of_all = run_graph(ends, inputs, retain=retain)
        if len(inputs) < len(all_inputs):
            found = iter(of_all)
            of_all = [None if one is None else next(found) for one in all_inputs]
        first_skip, first_parameter = len(self.ins), len(self.ins) + len(skips)
        return of_all[:first_skip], of_all[first_skip:first_parameter], of_all[first_parameter:]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (phony.data, *[t.detach() for t in tensors])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        # They are taken out of the task's own graph before they get here.
        raise RuntimeError(
            "the gradients of one micro-batch reached the inputs of another: the model keeps a tensor of one call for "
            "the next, such as a state in an attribute of a module, and in a pipeline the next call begins before this "
            "one has ended; detach what is kept, or keep nothing in training (use_cache=False)"
        )


# `_Enter.apply` without its check for functorch, whose transforms do not reach a worker.
_enter: Any = super(torch.autograd.Function, _Enter).apply


def enter(
    phony: Tensor, tensors: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[list[Tensor | None], list[GradientEdge | None], Tensor | None]:
    """Make tensors the roots of a partition's own graph.

    Return them, the edges their gradients arrive at, and an empty tensor that keeps the edges valid. The roots are no
    leaves, so that a first layer may change them in place, and nothing here keeps them alive. ``phony`` is any empty
    tensor that requires grad, for the roots to require it too.
    """
    places = [k for k, need in enumerate(needed) if need and tensors[k] is not None]
    entered = list(tensors)
    edges: list[GradientEdge | None] = [None] * len(entered)
    if not places:
        return entered, edges, None
    roots = _enter(phony, *[tensors[k] for k in places])
    anchor = roots[0]
    node = anchor.grad_fn
    for output_nr, k in enumerate(places, start=1):
        entered[k], edges[k] = roots[output_nr], GradientEdge(node, output_nr)
    return entered, edges, anchor


def leads_to_roots(tensors: Iterable[Tensor]) -> bool:
    """Tell whether tensors were computed from such roots."""
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_of_function(node, _Enter):
            return True
        stack += [above for above, _ in node.next_functions]
    return False


class _PythonEdge(GradientEdge):
    """Leads to a node that is written in Python. Such a node does not keep its graph alive, but one above it does.

    `get_gradient_edge` sees to that only from torch 2.9 on.
    """

    owner: Node | None


def edge_of(tensor: Tensor | None, anchor: Tensor | None = None) -> GradientEdge | None:
    """Return where the gradient of ``tensor`` arrives in its graph, without keeping the tensor alive.

    ``anchor`` is that of the graph's roots, one of which the tensor may be.
    """
    if tensor is None or not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, PythonNode) and (anchor is None or node is not anchor.grad_fn):
        edge = _PythonEdge(node, tensor.output_nr)
        with torch.enable_grad():
            edge.owner = tensor.view_as(tensor).grad_fn
        return edge
    return GradientEdge(node, tensor.output_nr)  # what `get_gradient_edge` returns, sooner
