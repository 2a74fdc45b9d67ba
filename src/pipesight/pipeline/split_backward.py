"""The backward of a task in two parts: first the gradients that another partition waits for, later those of weights.

A node of the graph that leads both to an input of the task and to weights, such as a matrix product, runs twice: in the
first part for its input alone, in the second for its weight alone, from the gradient that it got in the first. ::

    outputs ──> product ──> ... ──> product ──> inputs        first part: this line
                   └──> weights        └──> weights           second part: what hangs down
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipesight.pipeline.gradients import run_graph
from pipesight.pipeline.local_graph import LocalGraph, edge_of

__all__ = ["RestOfBackward", "SplitBackward", "run_backward", "run_input_backward"]

_End: TypeAlias = tuple[GradientEdge, Tensor]
"""An output, and its gradient."""


class SplitBackward:
    """Runs the graph of a task in two parts, and returns the gradients.

    The edges and anchors of the ``graph`` are kept until both parts have run.
    """

    def __init__(self, graph: LocalGraph) -> None:
        self._graph = graph
        self._weights: list[Tensor | None] | None = None
        self._second: _SecondPart | None = None

    def run_inputs(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of what arrived, given those of the outputs."""
        pairs = zip(self._graph.outs, gradients, strict=True)
        ends = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
        gradients.clear()
        roots = [edge for _, edge in self._graph.arriving]
        second = self._second = _SecondPart(ends, roots, self._graph.parameters)
        if not second.can_wait:
            return self._run_whole(ends, roots)
        above = second.ends_above_roots()
        return run_graph(above, roots, retain=True) if above else [None] * len(roots)

    def run_weights(self) -> list[Tensor | None]:
        """Return the gradients of the parameters of the graph."""
        if self._weights is not None:
            found, self._weights = self._weights, None
            return found
        assert self._second is not None
        by_id: dict[int, Tensor | None] = {}
        for ends, weights in self._second.groups():
            wanted = [weight for weight in weights if weight.requires_grad]  # they may be frozen by now
            if wanted:
                by_id.update(zip(map(id, wanted), run_graph(ends, wanted, retain=True), strict=True))
        self._second.forget()
        return [by_id.get(id(parameter)) for parameter in self._graph.parameters]

    def waiting(self) -> list[Tensor]:
        """Return the gradients that the second part starts from."""
        if self._weights is not None:
            return [gradient for gradient in self._weights if gradient is not None]
        return [] if self._second is None else self._second.gradients()

    def _run_whole(self, ends: Sequence[_End], roots: Sequence[GradientEdge]) -> list[Tensor | None]:
        parameters = self._graph.parameters
        wanted: list[GradientEdge | Tensor] = [*roots, *[p for p in parameters if p.requires_grad]]
        found = iter(run_graph(ends, wanted, retain=False) if ends and wanted else [None] * len(wanted))
        of_roots = [next(found) for _ in roots]
        self._weights = [next(found) if p.requires_grad else None for p in parameters]
        return of_roots


class RestOfBackward:
    """What a backward has left for later: it adds to ``.grad``, and calls all hooks of weights."""

    def __init__(self, second: _SecondPart | None, *, is_whole: bool) -> None:
        self._second = second
        self.is_whole = is_whole
        """Nothing of the backward has been run: no output depends on an input."""

    def waiting(self) -> list[Tensor]:
        """Return the gradients that it starts from."""
        return [] if self._second is None else self._second.gradients()

    def run(self) -> None:
        """Add the gradients of the weights to ``.grad``."""
        second, self._second = self._second, None
        if second is None:
            return
        for ends, weights in second.groups():
            edges, gradients = zip(*ends, strict=True)
            torch.autograd.backward(edges, gradients, retain_graph=not self.is_whole, inputs=weights)
        second.forget()


def run_backward(ends: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run a whole backward, which adds to ``.grad``."""
    if ends:
        torch.autograd.backward(ends, gradients)


def run_input_backward(ends: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> RestOfBackward:
    """Compute the gradients of the inputs; return the rest.

    The ``leaves`` are the inputs, and get ``.grad``.
    """
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    edges = [get_gradient_edge(end) for end in ends]
    second = _SecondPart([*zip(edges, gradients, strict=True)], [get_gradient_edge(leaf) for leaf in learning])
    if not second.can_wait:
        torch.autograd.backward(edges, gradients)
        return RestOfBackward(None, is_whole=False)
    above = second.ends_above_roots()
    if above:
        starts, given = zip(*above, strict=True)
        found = torch.autograd.grad(starts, learning, given, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(learning, found, strict=True):
            leaf.grad = gradient
    return RestOfBackward(second, is_whole=not above)


class _SecondPart:
    """Knows where the second part starts, and which weights each start leads to.

    ``roots`` are where the gradients of the inputs arrive, ``weights`` those that are wanted: by default all leaves but
    roots.
    """

    def __init__(
        self, ends: Sequence[_End], roots: Sequence[GradientEdge], weights: Sequence[Tensor] | None = None
    ) -> None:
        self.can_wait = True
        """Whether the graph can be run twice; else its first part must be all of it."""
        self._finds = weights is None
        self._weights = list(weights or ())
        self._parts: list[tuple[int, _Start]] = []
        self._ends = list(ends)
        self._leads_to: dict[Any, int] = {edge.node: _ROOT for edge in roots}
        for k, weight in enumerate(self._weights):
            if (edge := edge_of(weight)) is not None:
                self._leads_to[edge.node] = self._leads_to.get(edge.node, 0) | 2 << k
        self._walk()
        for edge, gradient in ends:
            if (mask := self._leads_to[edge.node]) and not mask & _ROOT:
                self._parts.append((mask, _Start(edge, gradient)))
        if not self.can_wait:
            self.forget()

    def ends_above_roots(self) -> list[_End]:
        """Return the ends that lead to inputs; after that, it knows only the others."""
        above = [end for end in self._ends if self._leads_to[end[0].node] & _ROOT]
        self._ends, self._leads_to = [], {}
        return above

    def groups(self) -> list[tuple[list[_End], list[Tensor]]]:
        """Return where to start, with what gradients, and for which weights: each weight is there once."""
        found = []
        for mask, starts in _grouped(self._parts):
            ends = [end for start in starts if (end := start.end()) is not None]
            weights = [weight for k, weight in enumerate(self._weights) if mask >> (k + 1) & 1]
            if ends and weights:
                found.append((ends, weights))
        return found

    def gradients(self) -> list[Tensor]:
        """Return those that it starts from, as far as they are known by now."""
        return [end[1] for _, start in self._parts if (end := start.end()) is not None]

    def forget(self) -> None:
        """Let go of the graph and its gradients."""
        for _, start in self._parts:
            start.forget()
        self._parts, self._ends, self._leads_to = [], [], {}

    def _walk(self) -> None:
        """Note where the second part starts, and what each node leads to: a bit for inputs, one for each weight."""
        leads_to = self._leads_to
        stack: list[Any] = [edge.node for edge, _ in self._ends]
        above: dict[Any, list[Any]] = {}
        while stack:  # a node stays on it until what it was computed from is known
            node = stack[-1]
            if node in leads_to:
                stack.pop()
                continue
            if (inputs := above.get(node)) is None:
                inputs = above[node] = [other for other, _ in node.next_functions if other is not None]
                if unknown := [other for other in inputs if other not in leads_to]:
                    stack += unknown
                    continue
            stack.pop()
            mask = weights = 0
            for other in inputs:
                mask |= leads_to[other]
                if not leads_to[other] & _ROOT:
                    weights |= leads_to[other]
            if not inputs and self._finds and (leaf := getattr(node, "variable", None)) is not None:
                self._weights.append(leaf)
                mask = 1 << len(self._weights)
            leads_to[node] = mask
            if mask & _ROOT and weights:
                if "CompiledFunction" in node.name():  # it may have given its memory away when it has run once
                    self.can_wait = False
                self._parts.append((weights, _Branch(node)))


_ROOT = 1


class _Start:
    """Where a part of the second part starts: an output that leads to no input."""

    def __init__(self, edge: GradientEdge | None, gradient: Tensor | None) -> None:
        self.edge, self.gradient = edge, gradient

    def end(self) -> tuple[GradientEdge, Tensor] | None:
        """Return where to start, and from which gradient."""
        return None if self.edge is None or self.gradient is None else (self.edge, self.gradient)

    def forget(self) -> None:
        """Let go of what it holds."""
        self.edge = self.gradient = None


class _Branch(_Start):
    """A node that leads to inputs and to weights; it notes its gradient in the first part.

    In the second part, it runs from the very same gradient, whatever other hooks have done to it again, and whatever
    arrives from a node of the same group above it.
    """

    def __init__(self, node: Any) -> None:
        super().__init__(None, None)
        noted: list[tuple[Tensor | None, ...]] = []

        def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            if noted:
                return noted[0]
            noted.append(gradients)
            return None

        self._node, self._noted, self._handle = node, noted, node.register_prehook(hook)

    def end(self) -> tuple[GradientEdge, Tensor] | None:
        for k, gradient in enumerate(self._noted[0] if self._noted else ()):
            if gradient is not None:
                return GradientEdge(self._node, k), gradient
        return None

    def forget(self) -> None:
        self._handle.remove()
        self._noted.clear()
        self._node = None


def _grouped(parts: Sequence[tuple[int, _Start]]) -> list[tuple[int, list[_Start]]]:
    """Put together what leads to the same weights, such as one that is used twice: each weight is in one group."""
    groups: list[tuple[int, list[_Start]]] = []
    for mask, start in parts:
        own, members = mask, [start]
        apart = []
        for other in groups:
            if other[0] & mask:
                own, members = own | other[0], [*other[1], *members]
            else:
                apart.append(other)
        groups = [*apart, (own, members)]
    return groups
