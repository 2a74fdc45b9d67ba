"""Which inputs and parameters the output of a mini-batch depends on, as the graph of the plain model would show it.

The graphs of the tasks are not part of the caller's graph, in which the whole pipeline is one node. A parameter that
this node has an edge to gets a gradient, or `None`; then its hooks are called, and `DistributedDataParallel` takes it
for used. So the node must have no edge to a parameter that no output depends on, because no layer used it or because a
later partition dropped or detached what it was used for.

Each task notes what each of its outputs leads to in its own graph: inputs, skips that arrived, leaves. Those notes,
from the outputs of the last partition backward, give the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipesight._torch.autograd import sequence_number
from pipesight.pipeline.local_graph import LocalGraph, edge_of
from pipesight.pipeline.partition import PlacedPartition

__all__ = ["Dependencies", "LeakError", "Place"]

Place: TypeAlias = Hashable
"""A tensor on its way: where it enters, ``(partition, position)``, or the key of a skip."""

Notes: TypeAlias = list[tuple[Place, set[Place], set[int]]]
"""For each output of a task that wants a gradient, what it leads to: tensors that came in, and the ids of leaves."""

_NOTHING: Notes = []


class LeakError(Exception):
    """The graph of a task reaches into that of another partition; the argument is the autograd node there."""


class Dependencies:
    """Notes what the outputs of each task of a mini-batch lead to."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._notes: dict[tuple[int, int], Notes] = {}
        self._known: dict[int, int] = {}  # for a partition, a micro-batch in which every output led to everything

    def note(
        self,
        i: int,
        partition: PlacedPartition,
        graph: LocalGraph,
        places: Sequence[Place] | None = None,
        floor: int = 0,
    ) -> list[Tensor]:
        """Note what the outputs of a task lead to; return leaves that are new to its partition.

        Graphs look alike: once a mini-batch has shown that every output leads to everything there is, the rest of it is
        not looked at. A partition that is new may still have something to show.

        Args:
            i: The micro-batch.
            partition: That of the task.
            graph: That of the task.
            places: Where each of the outputs goes; by default to the next partition, and skips to theirs.
            floor: The autograd number at which the task began: its graph must not reach an older node.
        """
        known = self._known.get(partition.j)
        if known is not None and not partition.new:
            notes = self._notes[known, partition.j]
            if places is None or [place for place, _, _ in notes] == list(places):
                self._notes[i, partition.j] = notes
                return []
        stops: dict[tuple[Any, int], Place] = {}
        for k, edge in enumerate(graph.ins):
            if edge is not None:
                stops[edge.node, edge.output_nr] = (graph.first, k)
        stops.update({(edge.node, edge.output_nr): key for key, edge in graph.arriving})
        everything: set[Place] = set(stops.values())
        # A parameter can have a graph of its own, as in `torch.func.functional_call`: the caller's, not ours.
        derived = {id(p): p for p in graph.parameters if p.grad_fn is not None}
        edges = {key: edge_of(p) for key, p in derived.items()}
        stops.update({(edge.node, edge.output_nr): key for key, edge in edges.items() if edge is not None})
        if places is None:
            count = len(graph.outs) - len(partition.leaving)
            places = [*((partition.j + 1, k) for k in range(count)), *partition.leaving]
        notes = []
        leaves: set[Tensor] = set()
        for place, out in zip(places, graph.outs, strict=True):
            if out is not None:
                stopped, found = _follow(out, stops, floor)
                leaves |= found
                inner = {key for key in derived if key in stopped}
                notes.append((place, stopped - inner, inner | {id(leaf) for leaf in found}))
        self._notes[i, partition.j] = notes
        everything_used = {id(p) for p in graph.parameters}
        if notes and all(stopped == everything and used >= everything_used for _, stopped, used in notes):
            self._known.setdefault(partition.j, i)
        outside = partition.note_leaves(leaves, graph.parameters)
        graph.parameters += outside
        return outside

    def of_outputs(self, m: int, n: int, outputs: int) -> tuple[set[int], set[int]]:
        """Return the positions of inputs, and the ids of leaves, that the outputs of any micro-batch depend on."""
        inputs: set[int] = set()
        used: set[int] = set()
        last: list[Any] = []
        for i in range(m):
            notes = [self._notes.get((i, j), _NOTHING) for j in reversed(range(n))]
            if len(last) == n and all(map(operator.is_, notes, last)):
                continue
            last = notes
            live: set[Place] = {(n, k) for k in range(outputs)}
            for place, stopped, ids in (note for of_task in notes for note in of_task):
                if place in live:
                    live |= stopped
                    used |= ids
            inputs |= {k for k in range(self._inputs) if (0, k) in live}
        return inputs, used


def _follow(start: GradientEdge, stops: Mapping[tuple[Any, int], Place], floor: int) -> tuple[set[Place], set[Tensor]]:
    """Walk a graph as backward would; return the stops and the leaves that it reaches."""
    ends = {node for node, _ in stops}
    stopped: set[Place] = set()
    leaves: set[Tensor] = set()
    seen: set[Any] = set()
    stack: list[Any] = [(start.node, start.output_nr)]
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node in ends:
            if edge in stops:
                stopped.add(stops[edge])
        elif node is not None and node not in seen:
            seen.add(node)
            if floor and sequence_number(node) < floor:
                raise LeakError(node.name())
            parents: Sequence[Any] = node.next_functions
            if parents:
                stack += parents
            elif (leaf := getattr(node, "variable", None)) is not None:
                leaves.add(leaf)
    return stopped, leaves
