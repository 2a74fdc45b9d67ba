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

Shape: TypeAlias = tuple[tuple[Place, int], ...] | None
"""Where each output of a task goes, and when in the task it was made: tasks that differ in it took different ways."""

_NOTHING: Notes = []


class LeakError(Exception):
    """The graph of a task reaches into that of another partition; the argument is the autograd node there."""


class Dependencies:
    """Notes what the outputs of each task of a mini-batch lead to."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._notes: dict[tuple[int, int], Notes] = {}
        self._known: dict[int, tuple[Shape, Notes]] = {}  # for a partition, of a micro-batch that led to everything

    def note(
        self,
        i: int,
        partition: PlacedPartition,
        graph: LocalGraph,
        places: Sequence[Place] | None = None,
        floor: int = 0,
    ) -> list[Tensor]:
        """Note what the outputs of a task lead to; return leaves that are new to its partition.

        Graphs look alike: once a micro-batch has shown that everything there is leads to its outputs, those of the same
        shape are not looked at. A partition that is new may still have something to show.

        ``places`` are where the outputs go; by default to the next partition, and skips to theirs. ``floor`` is the
        autograd number at which the task began: its graph must not reach an older node.
        """
        shape: Shape = None
        if places is not None:
            numbers = [0 if out is None else sequence_number(out.node) - floor for out in graph.outs]
            shape = tuple(zip(places, numbers, strict=True))
        known = self._known.get(partition.j)
        if known is not None and known[0] == shape and not partition.new:
            self._notes[i, partition.j] = known[1]
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
        outs = [(place, out) for place, out in zip(places, graph.outs, strict=True) if out is not None]
        notes = []
        leaves: dict[int, Tensor] = {}
        for (place, _), (stopped, found) in zip(outs, _follow([out for _, out in outs], stops, floor), strict=True):
            leaves |= found
            inner = {key for key in derived if key in stopped}
            notes.append((place, stopped - inner, inner | found.keys()))
        self._notes[i, partition.j] = notes
        parameters = set(map(id, graph.parameters))
        # Without a shape, each output has to lead to everything; with it, all of them together.
        groups = [[note] for note in notes] if shape is None else [notes]
        if notes and all(_lead_to(group, everything, parameters) for group in groups):
            self._known.setdefault(partition.j, (shape, notes))
        outside = partition.note_leaves(leaves, parameters)
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


def _lead_to(notes: Notes, places: set[Place], leaves: set[int]) -> bool:
    """Whether outputs, taken together, lead to all of these."""
    stopped = set[Place]().union(*(note[1] for note in notes))
    used = set[int]().union(*(note[2] for note in notes))
    return stopped >= places and used >= leaves


def _follow(
    starts: Sequence[GradientEdge], stops: Mapping[tuple[Any, int], Place], floor: int
) -> list[tuple[set[Place], dict[int, Tensor]]]:
    """Walk a graph as backward would; return the stops and the leaves that each start leads to, these by id.

    Each node is visited once, however many starts lead to it. What a node leads to is a number, a bit for each end.
    """
    places = [*stops.values()]
    leaves: list[Tensor] = []
    bits = {edge: 1 << bit for bit, edge in enumerate(stops)}
    leads_to: dict[Any, int | None] = {node: None for node, _ in stops}  # None: it depends on which of its outputs
    parents: dict[Any, Sequence[tuple[Any, int]]] = {}
    stack: list[Any] = [start.node for start in starts]
    while stack:  # a node stays on it until what it was computed from is known
        node = stack[-1]
        if node in leads_to:
            stack.pop()
            continue
        above = parents.get(node)
        if above is None:
            if floor and sequence_number(node) < floor:
                raise LeakError(node.name())
            above = parents[node] = node.next_functions
            if unknown := [other for other, _ in above if other is not None and other not in leads_to]:
                stack += unknown
                continue
        mask = 0
        if above:
            for edge in above:
                if (of_edge := leads_to.get(edge[0])) is None:
                    of_edge = bits.get(edge, 0)
                mask |= of_edge
        elif (leaf := getattr(node, "variable", None)) is not None:
            mask = 1 << len(places) + len(leaves)
            leaves.append(leaf)
        leads_to[node] = mask
        stack.pop()
    ends: dict[int, tuple[set[Place], dict[int, Tensor]]] = {}
    found = []
    for start in starts:
        if (of_start := leads_to[start.node]) is None:
            of_start = bits.get((start.node, start.output_nr), 0)
        if of_start not in ends:
            ends[of_start] = (
                {place for bit, place in enumerate(places) if of_start >> bit & 1},
                {id(leaf): leaf for bit, leaf in enumerate(leaves, start=len(places)) if of_start >> bit & 1},
            )
        found.append(ends[of_start])
    return found
