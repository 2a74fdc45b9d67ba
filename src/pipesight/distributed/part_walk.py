"""Run one partition of a model on this rank, by calling the model's own forward.

What comes before the partition runs without values, and units not at all. Entering the partition swaps what crosses for
what was received; entering the next one ends the call. ::

    embedding   block 0   block 1 │ block 2   block 3 │ block 4   head
    ────── without values ─────── │ ──── for real ─── │ not called
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesight import context
from pipesight._nested import map_tensors, tensors_in
from pipesight._torch.autograd import (
    DIFFERENTIATING,
    around_functions,
    in_checkpoint,
    innermost_saved_tensor_hooks,
    next_sequence_number,
)
from pipesight._torch.function_modes import innermost_mode, without_innermost_mode
from pipesight._torch.tensors import with_function_overrides
from pipesight.distributed import stand_ins
from pipesight.distributed.model_plan import Plan
from pipesight.distributed.model_walk import Call, Doors, ModelCall, Name, Walk
from pipesight.pipeline.checkpoint import Buffers
from pipesight.pipeline.entering import EnteredArguments
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.partition import watch_backward
from pipesight.pipeline.randomness import PassRandomness, SavedGenerators, end_task
from pipesight.pipeline.unit_checkpoint import UnitCheckpoint

__all__ = ["PartWalk", "run_part"]


class _PartitionEnd(BaseException):
    """Ends a call of the model where the next partition begins.

    Not an ``Exception``, so that a model's own ``except Exception`` lets it pass.
    """


class PartWalk(Walk):
    """A call of the model for one partition.

    ``parameters`` are stand-ins, by the ids of these, ``units`` and ``outlines`` the units with and without values,
    ``repeated`` those that are run again in backward, with their buffers, by name.
    """

    def __init__(
        self,
        plan: Plan,
        own: int,
        received: Mapping[Name, Tensor],
        parameters: Mapping[int, Tensor],
        units: Mapping[str, nn.Module],
        outlines: Mapping[str, nn.Module],
        repeated: Mapping[str, tuple[nn.Module, Buffers]],
        *,
        cuts: Sequence[str],
        device: torch.device,
        i: int,
        randomness: PassRandomness,
    ) -> None:
        super().__init__(cuts, device, i, randomness)
        self._plan, self._own, self._received = plan, own, received
        self._parameters, self._units, self._outlines, self._repeated = parameters, units, outlines, repeated
        self._wanted = {crossing.name: crossing for crossing in plan.cuts[own + 1].tensors if crossing.name[0] == own}
        self.made: dict[Name, Tensor] = {}
        """What goes to later partitions."""
        self.checkpoints: list[UnitCheckpoint] = []
        """The units to run again."""
        self.kept_by_checkpoints: dict[int, tuple[Tensor, Tensor]] = {}
        """Stand-ins that ``torch.utils.checkpoint`` keeps to call a unit again with, by id, and what was received."""

    def arrive(self, cut: int) -> None:
        """Begin a partition; end the call if it is the next one."""
        if cut == self.j + 1:
            self.check_count()
        super().arrive(cut)
        if self.j > self._own:
            raise _PartitionEnd

    def check_count(self) -> None:
        """Raise if the model has made other calls in this partition than planned."""
        if self.n != self._plan.counts[self.j]:
            raise RuntimeError(
                f"the model made {self.n} calls in partition {self.j}, but {self._plan.counts[self.j]} when the ranks "
                "found out what it sends: it took another way, by something that differs from call to call or from "
                "rank to rank, such as a random number of Python's or an attribute that it changes"
            )

    def look(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a parameter."""
        return self._parameters.get(id(tensor), tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.j < self._own:
            return self.call_without_values(func, args, kwargs)
        args, kwargs = map_tensors(self.receive, args), map_tensors(self.receive, kwargs)
        if self.unit is None:
            self.next_stream()
        output = self._differentiated(func, args, kwargs) if func in DIFFERENTIATING else func(*args, **kwargs)
        target = stand_ins.changed_by(func, args, kwargs)
        if target is not None:
            self.count(func)
            self._keep((self.j, self.n, 0 if self.unit is None else self.m, 0), target)
        else:
            self._keep_all(func, output)
        return output

    def _differentiated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``torch.autograd.grad`` or ``backward``: units that it recomputes are no calls of the model."""
        before, self.unit = self.unit, self.unit or func.__name__
        try:
            return func(*args, **kwargs)
        finally:
            self.unit = before

    def receive(self, tensor: Tensor) -> Tensor:
        """Return what was received for a stand-in, and anything else as it is."""
        if not tensor.is_meta:
            if not self.is_written(tensor):
                return tensor
            self.check_written(tensor)
        name = self.names.get(id(tensor))
        if name is None or name not in self._received:
            raise RuntimeError(
                f"{stand_ins.place()} uses a tensor of another rank that was not sent (shape: {tuple(tensor.shape)}, "
                f"made by: {name}); a model that keeps state between calls cannot be cut over ranks"
            )
        if in_checkpoint(innermost_saved_tensor_hooks()):
            self.kept_by_checkpoints[id(tensor)] = (tensor, self._received[name])
        return self._received[name]

    def enter_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that a ``torch.autograd.Function`` is to be called with."""
        if self.j < self._own:
            return super().enter_function(args, kwargs)
        return map_tensors(self.receive, args), map_tensors(self.receive, kwargs)

    def leave_function(self, call: Call, output: Any) -> None:
        """Name what a ``torch.autograd.Function`` returns."""
        if self.j < self._own:
            super().leave_function(call, output)
        else:
            self._keep_all(call, output)

    def _keep_all(self, func: Call, output: Any) -> None:
        counted = False
        for k, tensor in enumerate(tensors_in(output)):
            if not counted:
                self.count(func)
                counted = True
            self._keep((self.j, self.n, 0 if self.unit is None else self.m, k), tensor)

    def _keep(self, name: Name, tensor: Tensor) -> None:
        wanted = self._wanted.get(name)
        if wanted is None:
            return
        if name[2] and self.way != wanted.way:
            raise RuntimeError(
                f"{stand_ins.place()} makes a tensor that later partitions use, in a block that has made other calls "
                f"before than when the ranks found out what it sends: {wanted}; what a block leaves in an attribute "
                "must not come after calls that depend on values, such as a choice of experts: return it instead"
            )
        self.made[name] = tensor

    def call_unit(self, unit: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit of this partition; of an earlier one, return what stands in for its result."""
        self.next_stream()
        self.n += 1
        n = self.n
        if self.j == self._own:
            entered = EnteredArguments(self.receive)
            output = self._call_observed(unit, call, entered.enter(args), entered.enter(kwargs))
            entered.leave()
            for k, tensor in enumerate(tensors_in(output)):
                self._keep((self.j, n, 0, k), tensor)
            return output
        result = self._plan.results.get((self.j, n))
        if result is not None:
            output = result.stand_ins((args, kwargs))
        else:
            outline = self._outlines[unit]
            with _setting_the_same(outline, self._units[unit]):
                output = self._inside(unit, outline, args, kwargs)
        self.name_result(n, output)
        return output

    def _inside(self, unit: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit and look at what is called inside it."""
        self.enter_unit(unit)
        try:
            with with_function_overrides():
                return call(*args, **kwargs)
        finally:
            self.unit = None

    def _call(self, unit: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (self.j, self.n) in self._plan.watched or innermost_mode() is not self:
            return self._inside(unit, call, args, kwargs)
        checkpoint = self._checkpoint(unit, args, kwargs) if unit in self._repeated else None
        generators: SavedGenerators | None = None
        self.unit = unit
        try:
            with with_function_overrides(), without_innermost_mode():
                output = call(*args, **kwargs)
            if checkpoint is not None:
                generators = end_task()
                self.checkpoints.append(checkpoint)
            return output
        finally:
            self.unit = None
            if checkpoint is not None:
                checkpoint.end(generators)

    def _checkpoint(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitCheckpoint | None:
        """Begin to drop what a unit saves for backward."""
        if not torch.is_grad_enabled():
            return None
        module, buffers = self._repeated[unit]
        task = (self._i, self.j, f"forward {self.n}")
        checkpoint = UnitCheckpoint(unit, module, buffers, args, kwargs, self._randomness, task)
        checkpoint.begin()
        return checkpoint

    def _call_observed(self, unit: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = context.current()
        if where is None:
            return self._call(unit, call, args, kwargs)
        where.layer = unit
        where.marks.append((next_sequence_number(), unit))
        if not where.observers.members:
            output = self._call(unit, call, args, kwargs)
        else:
            where.observers.layer_started(where)
            output = self._call(unit, call, args, kwargs)
            where.observers.layer_ended(where)
            watch_backward(tuple(tensors_in((args, kwargs))), tuple(tensors_in(output)), unit)
        where.layer = None
        return output


@contextlib.contextmanager
def _setting_the_same(outline: nn.Module, unit: nn.Module) -> Iterator[None]:
    """Set on the modules of a unit what a call of its outline sets on its own: the model may look for it there."""
    pairs = list(zip(outline.modules(), unit.modules(), strict=True))
    before = [dict(vars(module)) for module, _ in pairs]
    yield
    for (one, other), old in zip(pairs, before, strict=True):
        for name, value in vars(one).items():
            if name not in old or old[name] is not value:
                setattr(other, name, value)


def run_part(
    walk: PartWalk,
    doors: Doors,
    model: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    run: ModelCall,
) -> Any:
    """Run a partition; return what the last one gives, and ``None`` of others.

    ``run`` calls the model, and makes of its output what is wanted of it.
    """
    outer, doors.walk = doors.walk, walk
    args, kwargs = call
    try:
        with walk, around_functions(walk.call_function):
            output = run(model, args, kwargs)
        walk.check_count()
        flat = flatten(output)
        return flat.rebuild([walk.receive(tensor) for tensor in flat.tensors])
    except _PartitionEnd:
        return None
    finally:
        doors.walk = outer
