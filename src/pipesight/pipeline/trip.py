"""The way of one micro-batch through the model's own ``forward``, which goes on in one partition after the other.

Each micro-batch runs in one thread. When it calls the module that begins the next partition, it gives back its turn in
the partition that it leaves, and waits for its turn in the next. So partitions work on different micro-batches at once,
though each runs the model's own code from its first line to its last.

The autograd graph is cut where a tensor of an earlier partition is used: the operation gets a new root instead
(`local_graph.enter`), and the engine remembers both ends. Autograd numbers the nodes that a thread makes, so the number
of a tensor's node tells which partition made it. A `TorchFunctionMode` looks at all operations outside units, and at
all in a unit's first call. A unit that was seen to use nothing but its arguments is no longer looked at inside.
"""

from __future__ import annotations

import bisect
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesight._nested import PLAIN, map_tensors, tensors_in
from pipesight._torch.autograd import DIFFERENTIATING, around_functions, next_sequence_number, sequence_number
from pipesight._torch.function_modes import (
    DATA_GETTER,
    DATA_SETTER,
    OWN_GETTERS,
    innermost_mode,
    pop_mode,
    push_mode,
)
from pipesight._torch.module_internals import forward_hook_tables, not_compiled
from pipesight.context import Kept
from pipesight.pipeline.attribute_access import used, watch_attributes
from pipesight.pipeline.attributes import Attributes
from pipesight.pipeline.dependencies import Place
from pipesight.pipeline.entering import EnteredArguments
from pipesight.pipeline.local_graph import LocalGraph, edge_of, enter, leads_to_roots
from pipesight.pipeline.partition import watch_backward
from pipesight.pipeline.placed_units import Unit
from pipesight.pipeline.randomness import begin_task, end_task
from pipesight.pipeline.roots import Roots
from pipesight.pipeline.unit_checkpoint import UnitCheckpoint

if TYPE_CHECKING:
    from pipesight.pipeline.trips import Trips

__all__ = ["Trip", "TripGraph", "hook", "is_under_way"]

_HOLD_NOTHING = PLAIN | {torch.dtype, torch.device, torch.Size, slice}


@dataclass(slots=True)
class TripGraph(LocalGraph):
    """The local graph of a task: its inputs are tensors of earlier partitions, its outputs those that others use."""

    floor: int = 0  # autograd's number when the task began
    sources: list[int] = field(default_factory=list)  # for each of `arriving`, the partition that it comes from
    consumers: list[int] = field(default_factory=list)  # for each of `outs`, the partition that uses it; n: the caller
    places: list[Place] = field(default_factory=list)  # for each of `outs`, a name
    units: list[UnitCheckpoint] = field(default_factory=list)  # those to recompute

    def __post_init__(self) -> None:
        self.ins, self.arriving, self.anchors, self.parameters = [], [], [], []
        self.outs, self.promised = [], []

    def export(self, tensor: Tensor, consumer: int, place: Place) -> None:
        """Note that a tensor of this graph is used by another partition, or by the caller."""
        self.outs.append(edge_of(tensor))
        self.consumers.append(consumer)
        self.places.append(place)
        self.promised.append(True)


class Trip(TorchFunctionMode):
    """One micro-batch on its way.

    Args:
        trips: Those of the mini-batch.
        i: Which micro-batch it is.
        inputs: What it got of the caller's tensors that want a gradient.
    """

    def __init__(self, trips: Trips, i: int, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._trips, self.i, self._inputs = trips, i, list(inputs)
        self._placement, self._grad = trips.placement, trips.minibatch.grad
        self._checkpointed = i < trips.minibatch.checkpoint_stop
        self._cuts_graph = self._grad and trips.n > 1
        self._moves = not self._placement.on_one_device
        self.j = 0
        self.graphs: list[TripGraph] = []
        self._starts: list[int] = []
        self.roots = Roots(trips.n)
        self.attributes = Attributes(trips.attributes, i)
        self._lesson = trips.attributes.lesson
        self._sees_leaves = self._moves or self._lesson is not None  # also those that do not learn
        self._looks = self._cuts_graph or self._sees_leaves
        self._calls = 0
        self._unit: Unit | None = None
        self._entered: EnteredArguments | None = None  # its arguments
        self._handled: BaseException | None = None  # the unit is called while it is handled
        self._checkpoint: UnitCheckpoint | None = None
        self._given: Any = ()  # the arguments of the model
        self._looking = False  # the mode is on the stack
        self._busy = False  # what runs now is the engine's own
        self._start = 0  # autograd's number when the task began

    # From beginning to end.

    def run(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: Callable[[Any], Tensor] | None = None,
    ) -> Any:
        """Call the model in this thread; return its output, or what ``loss`` makes of it in the last partition."""
        _here.trip = self
        self._given = args, kwargs
        self._begin_task(0)
        self._look(self._looks)
        try:
            with used(self.attributes), around_functions(self._call_function):
                output = model(*args, **kwargs)
            while self.j < self._trips.n - 1:  # the model did not call the other cuts
                self._switch()
            if loss is not None:
                where = self._trips.wheres[self.j]
                where.layer = "loss_fn"
                where.marks.append((next_sequence_number(), "loss_fn"))
                begin_task(self._trips.minibatch.randomness, (self.i, self.j, "loss"))
                output = loss(output)
                where.layer = None
        except BaseException:
            self._leave_unit()
            end_task()
            raise
        finally:
            self._look(False)
            _here.trip = None
            self._given = ()
        return output

    def finish(self) -> None:
        """End the last task, and let go of all graphs."""
        self._end_task()
        self.attributes.end()
        # This thread may not run again before others have gone on, and would keep alive what they free.
        self.graphs.clear()
        self.roots.clear()

    def arrive(self, k: int, arguments: Any = ()) -> None:
        """Go on in partition k, whose first module is about to be called with these arguments."""
        if self.j >= k:
            raise RuntimeError(
                f"'{self._placement.names[k]}', which begins partition {k}, was called in partition {self.j}: "
                + (
                    "it is called more than once, and a cut must be called once"
                    if self.j == k
                    else f"before it, '{self._placement.names[self.j]}' was, which begins a later partition; list the "
                    "cuts in the order in which the model calls them"
                )
                + f" (cuts: {self._placement.names[1:]})"
            )
        self._trips.called.add(k)
        while self.j < k:
            self._switch(arguments)

    def _switch(self, arguments: Any = ()) -> None:
        rests = self._rest()
        try:
            self._end_task(arguments)
            self._trips.go_on(self.i, self.j)
            self._begin_task(self.j + 1)
        finally:
            self._busy = False
            self._look(rests or self._looking)

    def _begin_task(self, j: int) -> None:
        trips = self._trips
        self.j = self.attributes.partition = j
        self._calls = 0
        where = trips.enter(j)
        if self._grad:
            self._start = next_sequence_number()
            self._starts.append(self._start)
            graph = TripGraph(j, floor=self._start)
            graph.parameters = [*trips.tape.parameters[j], *self._inputs]
            self.graphs.append(graph)
        trips.begin(where, trips.partitions[j], self.i, "forward", checkpointing=self._checkpointed)
        begin_task(trips.minibatch.randomness, (self.i, j, "forward"))

    def _end_task(self, outputs: Any = ()) -> None:
        trips, where = self._trips, self._trips.wheres[self.j]
        end_task()
        self.attributes.end_task()
        if self._grad:
            self.graphs[self.j].marks = where.marks
            self.roots.check(self.j)
            where.kept = functools.partial(self._kept, outputs)
        trips.end(where)

    def _kept(self, outputs: Any) -> Kept:
        """Return what the task under way keeps for its backward; it, or an earlier one, has made ``outputs``."""
        start, graph = self._starts[self.j], self.graphs[self.j]
        nodes = [t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None]
        arrived = self.roots.of(self.j)
        arrived += tensors_in(self._given) if self.j == 0 else []
        arrived += self._trips.targets_of(self.i) if self.j == self._trips.n - 1 else []
        again = [t for unit in graph.units for t in unit.arguments]
        return Kept([*arrived, *again], [*graph.outs, *(node for node in nodes if sequence_number(node) >= start)])

    # Units.

    def enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin the call of a module: a cut, a unit, or both; return its arguments as this partition sees them."""
        if self._unit is not None:  # a module of it
            return None
        cut = self._placement.cuts.get(module)
        if cut is not None:
            self.arrive(cut, (args, kwargs))
        unit = self._placement.units.get(module)
        if unit is None:
            return None
        rests = self._rest()
        try:
            return self._enter_unit(unit, args, kwargs)
        finally:
            self._busy = False
            known = self._lesson is None and unit.closed.get(self._grad)
            if rests and (self._unit is None or not (known or unit.is_compiled)):
                self._look(True)

    def _enter_unit(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trips, where = self._trips, self._trips.wheres[self.j]
        if unit not in trips.placement.placed[self.j].seen:
            trips.placement.settle(unit, self.j)
        if self._looks:
            self._entered = EnteredArguments(self._enter_tensor)
            args, kwargs = self._entered.enter_call(args, kwargs)
        self._unit, self._handled = unit, sys.exception()
        self._calls += 1
        where.layer = unit.name
        where.marks.append((next_sequence_number(), unit.name))
        if where.observers.members:
            where.observers.layer_started(where)
        task = (self.i, self.j, f"forward {self._calls}")
        begin_task(trips.minibatch.randomness, task)
        if self._checkpointed and unit.is_checkpointed and torch.is_grad_enabled():
            self._checkpoint = UnitCheckpoint(
                unit.name, unit.module, unit.buffers, args, kwargs, trips.minibatch.randomness, task, self.attributes
            )
            self._checkpoint.begin()
        return args, kwargs

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the call of a unit, which may have raised."""
        unit = self._unit
        if unit is None or unit.module is not module:
            return
        if sys.exception() is not self._handled:  # which the model may catch
            self._leave_unit()
            self._look(self._looks)
            return
        self._rest()
        try:
            where = self._trips.wheres[self.j]
            checkpoint = self._checkpoint
            self._leave_unit()
            if checkpoint is not None:
                self.graphs[self.j].units.append(checkpoint)
            unit.closed.setdefault(self._grad, True)
            if where.observers.members:
                where.kept = functools.partial(self._kept, output) if self._grad else None
                where.observers.layer_ended(where)
                where.kept = None
                watch_backward(args, output, unit.name)
            where.layer = None
            begin_task(self._trips.minibatch.randomness, (self.i, self.j, f"after {self._calls}"))
        finally:
            self._busy = False
            self._look(self._looks)

    def _leave_unit(self) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.leave()
        self._unit = None
        generators = end_task()
        if checkpoint is not None:
            checkpoint.end(None if sys.exception() is not self._handled else generators)

    # Tensors.

    def _look(self, look: bool) -> None:
        if look != self._looking:
            self._looking = look
            if look:
                push_mode(self)
            else:
                pop_mode()

    def _rest(self) -> bool:
        """Begin what is the engine's own. Return whether that turned the mode off, which would see all of it."""
        self._busy = True
        rests = self._looking and innermost_mode() is self
        if rests:
            self._look(False)
        return rests

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with the tensors of earlier partitions replaced by roots of this one."""
        kwargs = kwargs or {}
        if self._busy or (getattr(func, "__name__", None) == "__get__" and func not in OWN_GETTERS):
            found = func(*args, **kwargs)
            if self._lesson is not None and func == DATA_GETTER:
                self._lesson.alias(args[0], found, self.j)
            return found
        if self._lesson is not None and func == DATA_SETTER:
            self._lesson.alias(args[0], None, self.j)
        differentiates = func in DIFFERENTIATING
        if not differentiates and self._stay(args) and (not kwargs or self._stay(kwargs.values())):
            return func(*args, **kwargs)
        if self._cuts_graph and differentiates:
            self._busy = True
            try:
                self._refuse_to_differentiate(func, *args, **kwargs)
            finally:
                self._busy = False
        args, kwargs = self._enter_call(args, kwargs)
        if not differentiates:
            return func(*args, **kwargs)
        _here.trip = None  # units that it recomputes are no calls of the model
        try:
            return func(*args, **kwargs)
        finally:
            _here.trip = self

    def _call_function(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the ``apply`` of a ``torch.autograd.Function``, which comes to no mode: only what it calls does."""
        if self._looking and not self._busy:
            args, kwargs = self._enter_call(args, kwargs)
        return call(*args, **kwargs)

    def _enter_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with the tensors of earlier partitions replaced by roots of this one."""
        self._busy = True
        try:
            entered = map_tensors(self._enter_tensor, args)
            more = map_tensors(self._enter_tensor, kwargs) if kwargs else kwargs
        finally:
            self._busy = False
        if self._unit is not None and (entered is not args or more is not kwargs):
            self._unit.closed[self._grad] = False
        return entered, more

    def _refuse_to_differentiate(self, func: Any, outputs: Any, inputs: Any = (), *args: Any, **kwargs: Any) -> None:
        """Raise if the model itself differentiates what it computed from tensors of earlier partitions."""
        of_others = any(t.grad_fn is None or self._enter_tensor(t) is not t for t in tensors_in(inputs))
        if (of_others or func is not torch.autograd.grad) and leads_to_roots(tensors_in(outputs)):
            raise RuntimeError(
                f"the model differentiates in partition {self.j}, by torch.autograd, what it computed from tensors of "
                "earlier partitions, and their graphs cannot be reached from there; cut where all of that is in one "
                f"partition (cuts: {self._placement.names[1:]})"
            )

    def _stay(self, arguments: Iterable[Any]) -> bool:
        """Whether no argument is replaced, as is seen at once: nearly all are tensors of this partition, or numbers."""
        if self._sees_leaves:
            return False
        for argument in arguments:
            if isinstance(argument, Tensor):
                node = argument.grad_fn
                if argument.requires_grad if node is None else sequence_number(node) < self._start:
                    return False
            elif type(argument) not in _HOLD_NOTHING:
                return False
        return True

    def _enter_tensor(self, tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        if node is None:
            return self._enter_leaf(tensor) if self._sees_leaves or tensor.requires_grad else tensor
        if self._cuts_graph and (number := sequence_number(node)) < self._start:
            return self._root_of(tensor, number)
        return tensor

    def _enter_leaf(self, tensor: Tensor) -> Tensor:
        """Return a parameter, a mask, an index: as it is, or its copy on this device."""
        if self._lesson is not None:
            self._lesson.use(tensor, self.j)
        j, device = self.j, self._placement.devices[self.j]
        if tensor.requires_grad and isinstance(tensor, nn.Parameter) and not self._placement.is_known(tensor, j):
            self._placement.use(tensor, j)
        if not self._moves or tensor.device == device or tensor.device not in self._placement.devices:
            return tensor
        if tensor.requires_grad and self._grad:
            copy = self._trips.copy_of(tensor, j)
            graph = self.graphs[j]
            if all(copy is not other for other in graph.parameters):
                graph.parameters.append(copy)
            return copy
        known = self.roots.get(j, tensor)
        if known is None:
            known = self.roots.add(j, tensor, self._trips.moved(self.roots.left(tensor), j, self.i))
        return known

    def _root_of(self, tensor: Tensor, number: int) -> Tensor:
        """Return what stands here for a tensor of an earlier partition, whose node has this number."""
        known = self.roots.get(self.j, tensor)
        if known is not None:
            return known
        if number < self._starts[0]:
            raise RuntimeError(
                f"partition {self.j} uses a tensor of shape {tuple(tensor.shape)} that was computed before this call "
                "of the model and has a graph: a model that keeps such state between calls cannot be a pipeline; "
                "detach() what it keeps"
            )
        source, origin = self.roots.latest(tensor, bisect.bisect_right(self._starts, number) - 1)
        place = (source, len(self.graphs[source].outs))
        self.graphs[source].export(origin, self.j, place)
        moved = self._trips.moved(origin.detach(), self.j, self.i)
        graph = self.graphs[self.j]
        with torch.enable_grad():  # the model may first use it without
            (root,), (edge,), anchor = enter(self._trips.partitions[self.j].phony, [moved], [True])
        assert root is not None
        assert edge is not None
        graph.arriving.append((place, edge))
        graph.sources.append(source)
        graph.anchors.append(anchor)
        return self.roots.add(self.j, tensor, root)

    def export_output(self, k: int, tensor: Tensor) -> bool:
        """Note that a tensor leaves the pipeline, as output k; return whether it has a graph."""
        if not (self._grad and tensor.requires_grad):
            return False
        if tensor.grad_fn is None or sequence_number(tensor.grad_fn) < self._starts[0]:
            with torch.enable_grad():  # a parameter or an input, as it is
                tensor = tensor.view_as(tensor)
        assert tensor.grad_fn is not None
        source = bisect.bisect_right(self._starts, sequence_number(tensor.grad_fn)) - 1
        source, tensor = self.roots.latest(tensor, source)
        self.graphs[source].export(tensor, self._trips.n, (self._trips.n, k))
        return True


class _PerThread(threading.local):
    trip: Trip | None = None


_here = _PerThread()


def is_under_way() -> bool:
    """Tell whether this thread calls a model for a micro-batch."""
    return _here.trip is not None


def hook(modules: Iterable[nn.Module]) -> None:
    """Let modules report their calls to the trip that calls them, if there is one. They keep these hooks."""
    watch_attributes()
    for module in modules:
        if _before in forward_hook_tables(module)[1].values():  # of another pipeline of this model, or of its copy
            continue
        module.register_forward_pre_hook(_before, prepend=True, with_kwargs=True)
        module.register_forward_hook(_after, always_call=True)


@not_compiled
def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trip = _here.trip
    return None if trip is None else trip.enter_module(module, args, kwargs)


@not_compiled
def _after(module: nn.Module, args: Any, output: Any) -> None:
    trip = _here.trip
    if trip is not None:
        trip.leave_module(module, args, output)
