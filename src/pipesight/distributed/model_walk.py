"""One call of a model's own forward, as a rank sees it: which partition it is in, and a name for each tensor.

Every rank makes the same call. Entering a cut begins the next partition. Calls of torch functions and of units are
counted, alike on every rank, so that the count names what they return: ``(partition, call, call inside a unit, place in
the result)``. What a rank does not compute are stand-ins without values; those that cross into its partition are
swapped for what was received.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesight._nested import map_tensors, tensors_in
from pipesight._torch.function_modes import innermost_mode
from pipesight._torch.module_internals import intercept_calls
from pipesight._torch.tensors import storage_id, without_function_overrides
from pipesight.distributed import stand_ins
from pipesight.distributed.stand_ins import META
from pipesight.pipeline.randomness import PassRandomness, begin_task, end_task

__all__ = ["Call", "Doors", "ModelCall", "Name", "UnitResult", "Walk", "signature", "whole_output"]

ModelCall: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a model with arguments, and makes of its output what is wanted, such as the loss."""

Name: TypeAlias = tuple[int, int, int, int]
"""A tensor: the partition that makes it, the call there, the call inside a unit (or 0), the place in its result."""

Call: TypeAlias = Callable[..., Any]


class Doors:
    """The entries of a model's units and cuts: while a walk is under way, it makes their calls."""

    def __init__(self, model: nn.Module, units: Sequence[str], cuts: Sequence[str]) -> None:
        self.walk: Walk | None = None
        self._swapped: Mapping[int, tuple[Tensor, Tensor]] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.units = {name: modules[name] for name in units}
        first = {modules[cut]: k for k, cut in enumerate(cuts, start=1)}
        names = {module: name for name, module in self.units.items()}
        for module in dict.fromkeys([*self.units.values(), *first]):
            intercept_calls(module, functools.partial(_enter, weakref.ref(self), names.get(module), first.get(module)))

    @contextlib.contextmanager
    def swapping(self, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Let calls outside walks be made with other tensors: those by id are replaced by the second of their pair."""
        before, self._swapped = self._swapped, pairs
        try:
            yield
        finally:
            self._swapped = before

    def _swap(self, tensor: Tensor) -> Tensor:
        return self._swapped.get(id(tensor), (tensor, tensor))[1]

    def enter(
        self, unit: str | None, cut: int | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make the call of a module."""
        walk = self.walk
        if walk is None:
            if self._swapped:
                args, kwargs = map_tensors(self._swap, args), map_tensors(self._swap, kwargs)
            return call(*args, **kwargs)
        if cut is not None:
            walk.arrive(cut)
        if unit is None or walk.unit is not None:
            return call(*args, **kwargs)
        with without_function_overrides():  # stand-ins would not tell the walk what they are
            return walk.call_unit(unit, call, args, kwargs)


def _enter(
    doors: weakref.ref[Doors],
    unit: str | None,
    cut: int | None,
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make the call of a module, which does not keep the doors that it belongs to."""
    there = doors()
    return call(*args, **kwargs) if there is None else there.enter(unit, cut, call, args, kwargs)


class Walk(TorchFunctionMode):
    """A call of the model, up to where it is.

    Each call outside units, and each unit, has a stream of ``randomness`` of its own.
    """

    def __init__(self, cuts: Sequence[str], device: torch.device, i: int, randomness: PassRandomness) -> None:
        super().__init__()
        self._cuts, self.device, self._i, self._randomness = cuts, device, i, randomness
        self._answers = stand_ins.answers_of(device)
        self.j = self.n = self.m = 0
        self.unit: str | None = None
        self.way = 0
        """A checksum of the calls inside the unit up to here: where it is another one, counts name other tensors."""
        self.names: dict[int, Name] = {}
        self._kept: list[Tensor] = []  # so that their ids stay theirs
        self._twins: dict[int, Tensor] = {}
        self._written: set[int] = set()  # storages of real tensors that something without values was written into
        self._rewritten: dict[int, int] = {}  # storages of stand-ins, and the partition that changed them in place
        self._found_stand_in = False
        self._function: str | None = None  # the torch.autograd.Function under way
        self.own_generators = False
        """Whether the model drew from generators of its own."""

    # What subclasses do differently.

    def look(self, tensor: Tensor) -> Tensor:
        """Return the stand-in for an argument of a torch function, or the argument itself."""
        raise NotImplementedError

    def call_unit(self, unit: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit. Called where torch functions do not come to the walk."""
        raise NotImplementedError

    def read_values(self, told: Any) -> None:
        """Note that Python is told of the values of a real tensor."""

    # Where the call is.

    def arrive(self, cut: int) -> None:
        """Begin a partition, whose first module is called."""
        if self._function is not None:
            is_checkpoint = self._function == "CheckpointFunction"
            raise RuntimeError(
                f"{stand_ins.place()} calls {self._cuts[cut - 1]!r}, which begins partition {cut}, inside a "
                f"torch.autograd.Function, {self._function}, which has one backward for all that it calls; "
                + ("use torch.utils.checkpoint with use_reentrant=False" if is_checkpoint else "cut before or after it")
            )
        if cut <= self.j:
            raise RuntimeError(
                f"{stand_ins.place()} calls {self._cuts[cut - 1]!r}, which begins partition {cut}, in partition "
                f"{self.j}: a cut must be called once, and cuts be given in the order in which the model calls them"
            )
        if cut > self.j + 1:
            raise RuntimeError(
                f"{stand_ins.place()} calls {self._cuts[cut - 1]!r}, which begins partition {cut}, before "
                f"{self._cuts[self.j]!r}, which begins partition {self.j + 1}; give cuts in the order in "
                "which the model calls them"
            )
        self.j, self.n = cut, 0

    def next_stream(self) -> None:
        """Let the next call draw from a random stream of its own."""
        self.end_stream()
        begin_task(self._randomness, (self._i, self.j, f"forward {self.n + 1}"))

    def end_stream(self) -> None:
        """Let the next call draw from the default generators."""
        self.own_generators = bool(end_task()) or self.own_generators

    def call_function(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the ``apply`` of a ``torch.autograd.Function``, which comes to no mode: only what it calls does."""
        if innermost_mode() is not self:
            return call(*args, **kwargs)
        with without_function_overrides():
            given, named = self.enter_function(args, kwargs)
        before, self._function = self._function, self._function or getattr(call, "__self__", call).__name__
        try:
            output = call(*given, **named)
        finally:
            self._function = before
        with without_function_overrides():
            self.leave_function(call, output)
        return output

    def enter_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that a ``torch.autograd.Function`` is to be called with."""
        return map_tensors(self._stand_in, args), map_tensors(self._stand_in, kwargs)

    def leave_function(self, call: Call, output: Any) -> None:
        """Name what a ``torch.autograd.Function`` returns."""
        self.name(call, output)

    # Without values.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call_without_values(func, args, kwargs or {})

    def call_without_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function outside the partitions of this rank."""
        before = self._found_stand_in
        self._found_stand_in = False
        try:
            given, named = map_tensors(self._stand_in, args), map_tensors(self._stand_in, kwargs)
            found = self._found_stand_in
        finally:
            self._found_stand_in = before
        if self.unit is None:
            self.next_stream()
        if not found:
            output = func(*given, **named)
            if stand_ins.needs_values(func, args):
                self.read_values(output)
        elif func in self._answers:
            return self._answers[func]
        elif (output := stand_ins.known(func, given)) is None:
            if rows := stand_ins.rows_chosen(func, given):
                self.read_values(rows)
            given, named = self._with_twin(stand_ins.changed_by(func, args, kwargs), given, named)
            output = stand_ins.call(func, given, named, self.device)
        target = stand_ins.changed_by(func, args, kwargs)
        if target is None:
            self.name(func, output)
        elif not found:
            self.count(func)
        else:
            return self._change(func, target, output)
        return output

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta and self._written and storage_id(tensor) in self._written:
            self.check_written(tensor)
            tensor = self.look(self._twins[id(tensor)])
        else:
            if tensor.is_meta and self._rewritten:
                self._check_rewritten(tensor)
            tensor = self.look(tensor)
        self._found_stand_in = self._found_stand_in or tensor.is_meta
        return tensor

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether something without values was written into a real tensor."""
        return bool(self._written) and storage_id(tensor) in self._written

    def check_written(self, tensor: Tensor) -> None:
        """Raise if a real tensor shares memory with one that something without values was written into."""
        if id(tensor) not in self._twins:
            raise NotImplementedError(
                f"{stand_ins.place()} uses a view of a tensor that an activation was written into after the view was "
                "made; ranks that do not compute the activation cannot follow that: make the view anew"
            )

    def _check_rewritten(self, tensor: Tensor) -> None:
        name, by = self.names.get(id(tensor)), self._rewritten.get(storage_id(tensor))
        if by is not None and name is not None and name[0] < by:
            raise NotImplementedError(
                f"{stand_ins.place()} uses a view of a tensor of partition {name[0]} that partition {by} has changed "
                "in place: on its rank, the two have memory of their own; clone() it before the change"
            )

    def _change(self, func: Call, target: Tensor, output: Any) -> Any:
        """Note that a tensor was changed in place."""
        if target.is_meta:
            name = self.names.get(id(target))
            if name is not None and name[0] < self.j:
                self._rewritten[storage_id(target)] = self.j
            self.name(func, target)
            return output
        self.count(func)
        self.note(self._twins[id(target)], 0)
        self.note(target, 0)
        return target if isinstance(output, Tensor) else output

    def _with_twin(
        self, target: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments in which a real tensor that is about to change has a stand-in.

        Its values are those of another rank from then on.
        """
        if target is None or target.is_meta or id(target) in self._twins:
            return args, kwargs
        twin = self._twins[id(target)] = target.to(META)
        self._written.add(storage_id(target))

        def swap(tensor: Tensor) -> Tensor:
            return twin if tensor is target else tensor

        return map_tensors(swap, args), map_tensors(swap, kwargs)

    # Names.

    def enter_unit(self, unit: str) -> None:
        """Count the calls inside a unit from now on."""
        self.unit, self.m, self.way = unit, 0, 0

    def count(self, func: Call) -> None:
        """Count a call."""
        if self.unit is None:
            self.n += 1
        else:
            self.m += 1
            self.way = zlib.crc32(getattr(func, "__name__", "").encode(), self.way)

    def name(self, func: Call, output: Any) -> None:
        """Name the tensors that a call returns."""
        numbered = False
        for k, tensor in enumerate(tensors_in(output)):
            if not numbered:
                self.count(func)
                numbered = True
            if tensor.is_meta:
                self.note(tensor, k)

    def note(self, tensor: Tensor, k: int) -> None:
        """Name a tensor that the last call has returned."""
        self.names[id(tensor)] = (self.j, self.n, 0 if self.unit is None else self.m, k)
        self._kept.append(tensor)

    def name_result(self, n: int, output: Any) -> None:
        """Name the tensors that a unit returns."""
        for k, tensor in enumerate(tensors_in(output)):
            if tensor.is_meta:
                self.names[id(tensor)] = (self.j, n, 0, k)
                self._kept.append(tensor)


@dataclass(slots=True)
class UnitResult:
    """What a unit returns, without values, so that it need not be called again for the same kind of arguments."""

    output: Any
    """With a :class:`_New` or :class:`_Same` in the place of each tensor."""
    parameters: set[str]
    """Those it uses, by name."""
    random: bool
    """Whether it draws random numbers."""
    changes: set[str]
    """The buffers that it changes, by name."""

    @classmethod
    def of(cls, output: Any, args: Any, parameters: set[str], random: bool, changes: set[str]) -> UnitResult | None:
        """Return the result of a unit; ``None`` if there is more in it than tensors, numbers and names."""
        places = {id(tensor): k for k, tensor in enumerate(tensors_in(args))}
        if not _is_plain(output):
            return None

        def describe(tensor: Tensor) -> Any:
            if id(tensor) in places:
                return _Same(places[id(tensor)])
            if not tensor.is_meta:  # it depends on the arguments' values
                raise _RealError
            return _New(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

        try:
            return cls(map_tensors(describe, output), parameters, random, changes)
        except _RealError:
            return None

    def stand_ins(self, args: Any) -> Any:
        """Return what the unit would return for these arguments, without values."""
        return _rebuilt(self.output, list(tensors_in(args)))


class _RealError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _New:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


@dataclass(frozen=True, slots=True)
class _Same:
    place: int


def _rebuilt(value: Any, given: list[Tensor]) -> Any:
    if isinstance(value, _New):
        made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=META)
        return made.requires_grad_() if value.learns else made
    if isinstance(value, _Same):
        return given[value.place]
    if type(value) in (tuple, list):
        return type(value)(_rebuilt(item, given) for item in value)
    if type(value) is dict:
        return {key: _rebuilt(item, given) for key, item in value.items()}
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor) or value is None or isinstance(value, (bool, int, float, str)):
        return True
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, value.values()))


def whole_output(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model, and return its output as it is."""
    return model(*args, **kwargs)


def signature(value: Any) -> Any:
    """Return what the shapes that a call returns depend on, of an argument: all but the values of tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad, value.is_meta
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(signature, value))
    if isinstance(value, dict):
        return type(value), tuple((key, signature(item)) for key, item in value.items())
    return type(value)
