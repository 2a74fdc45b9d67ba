"""Find out, without computing anything, what a call of a model sends from partition to partition.

Every rank has an outline of the model: a copy with parameters that have no memory. A call of it gives every rank the
same plan: which tensors cross each cut, and which partition uses which parameters. Units that are called for the
second time with arguments of the same shapes are not run: what they return is known.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipesight._nested import map_tensors, tensors_in
from pipesight._torch.autograd import around_functions
from pipesight._torch.module_internals import HOOK_TABLES, forward_hook_tables
from pipesight._torch.operators import TorchDispatchMode
from pipesight._torch.tensors import with_function_overrides, without_function_overrides
from pipesight.context import Where, enter_thread
from pipesight.distributed.loss_weights import LossMeans, Mean
from pipesight.distributed.model_walk import Call, Doors, Name, UnitResult, Walk, signature
from pipesight.distributed.stand_ins import META, ValueNeededError, place
from pipesight.pipeline.checkpoint import versions_of
from pipesight.pipeline.flattening import Flat, flatten
from pipesight.pipeline.randomness import PassRandomness, isolated

__all__ = ["Crossing", "ModelOutline", "Plan", "PlannedCut"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that goes from one partition to another."""

    name: Name
    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    """Whether it needs a gradient."""

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """What one micro-batch sends over a cut; some of it only passes the next partition."""

    tensors: tuple[Crossing, ...]


@dataclass(slots=True)
class Plan:
    """What a call does, the same on every rank."""

    cuts: list[PlannedCut]
    """Before the first partition, where nothing crosses, after it, and so on."""
    needs: list[set[Name]]
    """What each partition takes of earlier ones."""
    counts: list[int]
    """How many calls there are in each."""
    watched: set[tuple[int, int]]
    """Calls of units inside which something crosses."""
    results: dict[tuple[int, int], UnitResult]
    """What calls of units return; those that are not there must be made."""
    parameters: list[set[str]]
    """Those that each partition uses, by name."""
    random: bool
    """Whether random numbers are drawn."""
    reads: list[Any]
    """What the model has read of the values of its arguments: if it reads something else, it may take another way."""
    units: list[list[str]]
    """Those that each partition is the first to call."""
    changes: set[int]
    """The arguments that the model changes in place, by their place among the tensors in them."""
    mean: Mean | None
    """What the result is a mean over, if that follows from the arguments."""

    def fingerprint(self) -> str:
        """Return what ranks compare."""
        return repr((self.cuts, self.counts, sorted(self.watched)))


class ModelOutline:
    """A model without its memory, and the plans of its calls.

    Args:
        model: The model, on any device or on ``meta``.
        units: Its units, by name.
        cuts: The modules that begin partitions 1, 2 and so on.
        device: Where it will run.
    """

    _REMEMBERED = 256

    def __init__(self, model: nn.Module, units: Sequence[str], cuts: Sequence[str], device: torch.device) -> None:
        self._cuts, self._device = cuts, device
        self.partitions = len(cuts) + 1
        self.module = _hollow(model)
        self._pairs = list(zip(self.module.modules(), model.modules(), strict=True))
        self.doors = Doors(self.module, units, cuts)
        self.parameters = {id(p): name for name, p in self.module.named_parameters()}
        self.buffers = dict(self.module.named_buffers())
        self.made = 0
        """How many plans there have been."""
        self._known: dict[Any, list[Plan]] = {}
        self._results: dict[Any, UnitResult | None] = {}

    def has_hooks(self, unit: str) -> bool:
        """Return whether a unit has hooks, which must see each of its calls."""
        modules = self.doors.units[unit].modules()
        return any(hooks for module in modules for hooks in forward_hook_tables(module))

    def buffers_of(self, unit: str) -> list[str]:
        """Return the names of the buffers of a unit."""
        return [name for name in self.buffers if name.startswith(f"{unit}.")]

    def follow(self) -> Any:
        """Take over the modes of the model and what it freezes; return what plans depend on besides arguments."""
        state: list[bool] = []
        for mine, theirs in self._pairs:
            if mine.training is not theirs.training:
                mine.training = theirs.training
            state.append(theirs.training)
            for key, parameter in theirs._parameters.items():
                if parameter is not None:
                    outlined = mine._parameters[key]
                    assert outlined is not None
                    if outlined.requires_grad is not parameter.requires_grad:
                        outlined.requires_grad_(parameter.requires_grad)
                    state.append(parameter.requires_grad)
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return tuple(state), autocast, torch.get_default_dtype(), torch.is_grad_enabled()

    def plan(
        self,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        finish: Callable[[Any], Any],
        surroundings: Any,
        i: int,
        randomness: PassRandomness,
        *,
        anew: bool = False,
    ) -> Plan:
        """Return what a call does.

        Args:
            call: The arguments of a micro-batch.
            finish: What the last partition does with the output of the model, such as taking the loss.
            surroundings: What :meth:`follow` returned.
            i: The micro-batch.
            randomness: That of the pass.
            anew: Find it out for these very values of the arguments.
        """
        if len(self._known) > self._REMEMBERED:
            self._known.clear()
        known = self._known.setdefault((signature(call), finish, surroundings), [])
        if known and not known[0].reads and not anew:
            return known[0]
        walk = functools.partial(self._walk, call, finish, surroundings, i, randomness)
        try:
            plan = walk([] if anew else known)
        except _KnownWay as found:
            return found.plan
        self.made += 1
        if not any(plan.reads == other.reads for other in known):
            # All units have been called; now once more with what is known of them, as later calls go.
            try:
                again = walk([])
                alike = (again.cuts, again.counts) == (plan.cuts, plan.counts)
            except Exception:
                alike = False
            if alike:
                again.changes |= plan.changes
                plan = again
            else:  # the model sees from outside whether its units have been called
                plan.results.clear()
                self._results.update(dict.fromkeys(self._results))
            known.append(plan)
        return plan

    def _walk(
        self,
        call: Any,
        finish: Callable[[Any], Any],
        surroundings: Any,
        i: int,
        randomness: PassRandomness,
        known: Sequence[Plan],
    ) -> Plan:
        """Call the outline; raise :class:`_KnownWay` as soon as it is sure to do what one of some plans says."""
        walk = _DryWalk(self, self._cuts, self._device, i, randomness, surroundings, self._results)
        walk.candidates = list(known)
        inside = Where()
        inside.phase = "forward"  # so that hooks on all modules, those of tracing among them, ignore this
        enter_thread(inside)
        detector = _RandomDetector()
        self.doors.walk = walk
        flat = flatten(call)
        own = [tensor.detach().clone() for tensor in flat.tensors]  # the model may change them, and will do so again
        args, kwargs = flat.rebuild(own)
        try:
            with isolated(), detector, walk, around_functions(walk.call_function):
                output = finish(self.module(*args, **kwargs))
                with without_function_overrides():
                    walk.end(output)
        except Exception as error:
            error.add_note(f"in partition {walk.j}, while its shapes were found out with tensors that have no values")
            raise
        finally:
            self.doors.walk = None
            walk.end_stream()
            inside.phase = None
        walk.random = walk.random or detector.seen
        walk.changes = {k for k, tensor in enumerate(own) if tensor._version or walk.is_written(tensor)}
        return walk.plan(self.partitions)


class _DryWalk(Walk):
    def __init__(
        self,
        outline: ModelOutline,
        cuts: Sequence[str],
        device: torch.device,
        i: int,
        randomness: PassRandomness,
        surroundings: Any,
        results: dict[Any, UnitResult | None],
    ) -> None:
        super().__init__(cuts, device, i, randomness)
        self._outline, self._surroundings, self._results = outline, surroundings, results
        n = len(cuts) + 1
        self.needs: list[set[Name]] = [set() for _ in range(n)]
        self.used: list[set[str]] = [set() for _ in range(n)]
        self.counts = [0] * n
        self.watched: set[tuple[int, int]] = set()
        self.results: dict[tuple[int, int], UnitResult] = {}
        self.random = False
        self.changes: set[int] = set()
        self.reads: list[Any] = []
        self.candidates: list[Plan] = []
        self.called: dict[str, int] = {}
        self.mean: Mean | None = None
        self._means = LossMeans()
        self._keys: dict[tuple[int, int], Any] = {}
        self._crossing: dict[Name, Crossing] = {}
        self._versions = {name: buffer._version for name, buffer in outline.buffers.items()}
        self._changed: dict[str, int] = {}  # buffers, and the partition that changes them
        self._given: set[int] = set()  # the tensors that the unit under way was given
        self._outside = False  # it has used others
        self._inside: set[str] = set()  # parameters that it uses

    def arrive(self, cut: int) -> None:
        """Begin a partition."""
        if cut == self.j + 1:
            self.counts[self.j] = self.n
            self._look_at_buffers()
        super().arrive(cut)

    def _look_at_buffers(self) -> None:
        """Raise if a buffer was changed that an earlier partition has changed, too: ranks have copies of it."""
        with without_function_overrides():
            for name, buffer in self._outline.buffers.items():
                if buffer._version != self._versions[name]:
                    self._versions[name] = buffer._version
                    self._change_buffer(name)

    def _change_buffer(self, name: str) -> None:
        j = self._changed.setdefault(name, self.j)
        if j != self.j:
            raise NotImplementedError(
                f"partitions {j} and {self.j} both change the buffer {name!r}, of which their ranks have copies; cut "
                "the model so that one partition makes all calls of its module, or freeze its statistics: eval()"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        self._means.note(func, args, kwargs or {}, output)
        return output

    def read_values(self, told: Any) -> None:
        """Note what the model reads; inside a unit only the shapes that may follow matter."""
        if self.unit is not None:
            self._outside = self._outside or isinstance(told, (Tensor, tuple))
            return
        self.reads.append(_comparable(told))
        self.candidates = [plan for plan in self.candidates if plan.reads[: len(self.reads)] == self.reads]
        for plan in self.candidates:
            if len(plan.reads) == len(self.reads):
                raise _KnownWay(plan)

    def look(self, tensor: Tensor) -> Tensor:
        """Note what is used here."""
        if (parameter := self._outline.parameters.get(id(tensor))) is not None:
            self.used[self.j].add(parameter)
            self._inside.add(parameter)
            return tensor
        name = self.names.get(id(tensor))
        if name is None:
            if tensor.is_meta:
                raise RuntimeError(
                    f"{place()} uses a tensor that an earlier call has left in the model, or that vmap or another "
                    "function of torch.func has made of an activation; keep nothing of one call for the next, and use "
                    "torch.func inside a block"
                )
            return tensor
        self._use(name, tensor)
        if self.unit is None:
            if name[2]:
                self._leak(name)
        elif name[:2] != (self.j, self.n) or not name[2]:
            if id(tensor) not in self._given:
                self._outside = True
                if name[0] < self.j:
                    self.watched.add((self.j, self.n))
            if name[2]:
                self._leak(name)
        return tensor

    def _use(self, name: Name, tensor: Tensor) -> None:
        if name[0] < self.j:
            self.needs[self.j].add(name)
            if name not in self._crossing:
                self._crossing[name] = Crossing(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def _leak(self, name: Name) -> None:
        """Note that something from inside a unit is used outside it, which is not in what it returned."""
        call = name[:2]
        self.results.pop(call, None)
        if call in self._keys:
            self._results[self._keys[call]] = None
        if name[0] < self.j:
            self.watched.add(call)

    def call_unit(self, unit: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit, unless what it returns is known."""
        self.next_stream()
        self.n += 1
        n, given = self.n, (args, kwargs)
        self.called.setdefault(unit, self.j)
        for tensor in tensors_in(given):  # as if it used them all
            self.look(tensor)
        key = unit, signature(given), self._surroundings
        result = self._results.get(key)
        if result is not None:
            self.used[self.j] |= result.parameters
            self.random = self.random or result.random
            for name in result.changes:
                self._change_buffer(name)
            output = result.stand_ins(given)
        else:
            output, result = self._run(unit, call, given, key)
        if result is not None:
            self.results[self.j, n] = result
        self.name_result(n, output)
        return output

    def _run(self, unit: str, call: Call, given: Any, key: Any) -> tuple[Any, UnitResult | None]:
        self.unit, self.m = unit, 0
        self._given = {id(tensor) for tensor in tensors_in(given)}
        self._outside, self._inside = False, set()
        real = [tensor for tensor in tensors_in(given) if not tensor.is_meta]
        versions = versions_of(real)
        arguments = flatten(given)  # as they are now: a cache grows in the call
        before = versions_of(arguments.tensors)
        detector, means = _RandomDetector(), len(self._means)
        needs_values: ValueNeededError | None = None
        try:
            with detector, with_function_overrides():
                output = call(*given[0], **given[1])
        except ValueNeededError as error:
            needs_values = error
            with detector:
                output, left = self._run_on_zeros(unit, arguments, error)
            if left != _changes(flatten(given), arguments.tensors, before):
                needs_values.add_note(f"'{unit}' changes what it is given after it has asked for them")
                raise
        except Exception as error:
            error.add_note(f"in layer '{unit}'")
            raise
        finally:
            self.unit = None
        self._look_at_buffers()
        if versions_of(real) != versions:
            raise NotImplementedError(
                f"'{unit}' changes a tensor in place that every rank computes for itself, such as a mask, where other "
                "ranks do not see it; change a copy of it: clone()"
            )
        result = None
        # What a loss is a mean over depends on values of targets.
        must_be_called = self._outside or len(self._means) > means or self._outline.has_hooks(unit)
        if not must_be_called and key not in self._results:
            changes = {name for name in self._outline.buffers_of(unit) if self._changed.get(name) == self.j}
            result = UnitResult.of(output, given, self._inside, detector.seen, changes)
        if result is None and needs_values is not None:
            raise needs_values
        self._keys[self.j, self.n] = key
        if key not in self._results:
            self._results[key] = result
        return output, result

    def _run_on_zeros(self, unit: str, arguments: Flat, error: ValueNeededError) -> tuple[Any, Any]:
        """Call a unit that branches on its own activations for the shapes it returns: with zeros for all values.

        The rank that has it sends what it really returns, after a check of the shapes. Also returned is what it has
        changed of its arguments, which were copies.
        """
        module = self._outline.doors.units[unit]
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            name = self._outline.parameters[id(parameter)]
            self.used[self.j].add(name)
            self._inside.add(name)
            memo[id(parameter)] = nn.Parameter(torch.zeros_like(parameter, device="cpu"), parameter.requires_grad)
        learns = any(t.requires_grad for t in (*arguments.tensors, *module.parameters())) and torch.is_grad_enabled()
        places: dict[int, Tensor] = {}

        def zeros(tensor: Tensor) -> Tensor:
            made = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()
            places[id(made)] = tensor
            kept.append(made)
            return made

        def back(tensor: Tensor) -> Tensor:
            if id(tensor) in places:
                return places[id(tensor)]
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
            return made.requires_grad_(learns and tensor.is_floating_point())

        kept: list[Tensor] = []
        try:
            with torch.no_grad():
                copies = [zeros(tensor) for tensor in arguments.tensors]
                versions = versions_of(copies)
                args, kwargs = arguments.rebuild(copies)
                output = copy.deepcopy(module, memo)(*args, **kwargs)
        except Exception:
            error.add_note(f"in layer '{unit}'")
            raise error from None
        return map_tensors(back, output), _changes(flatten((args, kwargs)), copies, versions)

    def end(self, output: Any) -> None:
        """Note what the call returns."""
        self.counts[self.j] = self.n
        self._look_at_buffers()
        if self.j + 1 < len(self.needs):
            raise RuntimeError(
                f"the model never called {self._cuts[self.j]!r}, where partition {self.j + 1} begins; cut it at "
                "modules that this call uses"
            )
        for tensor in flatten(output).tensors:
            self.look(tensor)
        self.mean = self._means.of(output)

    def plan(self, partitions: int) -> Plan:
        """Return what was found out."""
        cuts = []
        for k in range(partitions + 1):
            later: set[Name] = set().union(*self.needs[k:])
            names = sorted(name for name in later if name[0] < k)
            cuts.append(PlannedCut(tuple(self._crossing[name] for name in names)))
        units = [[unit for unit, j in self.called.items() if j == k] for k in range(partitions)]
        findings = (self.counts, self.watched, self.results, self.used, self.random, self.reads)
        return Plan(cuts, self.needs, *findings, units, self.changes, self.mean)


class _KnownWay(BaseException):
    """Ends a call of the outline: the rest of it is as in a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def _changes(now: Flat, given: Sequence[Tensor], versions: Sequence[int | None]) -> Any:
    """Return what a call has changed of its arguments: their structure, and which tensors are new or changed."""
    old = {id(tensor): version for tensor, version in zip(given, versions, strict=True)}
    fresh = [id(tensor) not in old or versions_of([tensor]) != [old[id(tensor)]] for tensor in now.tensors]
    return now.form, now.names, fresh


def _comparable(told: Any) -> Any:
    if isinstance(told, Tensor):
        return tuple(told.shape)
    if isinstance(told, tuple):
        return tuple(map(_comparable, told))
    return told.tobytes() if hasattr(told, "tobytes") else told


def _hollow(model: nn.Module) -> nn.Module:
    """Copy a model without the memory of its parameters and without hooks; buffers keep their values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=META)
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for child in model.modules():
        for name in HOOK_TABLES:
            hooks = child.__dict__.get(name)
            if hooks:  # those that others have put there belong to the model: it may read what they collect
                memo[id(hooks)] = type(hooks)({k: hook for k, hook in hooks.items() if not _is_ours(hook)})
    return copy.deepcopy(model, memo)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] == "pipesight"


class _RandomDetector(TorchDispatchMode):
    """Detects operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = True
        with without_function_overrides():  # it may come from where these are on, such as the end of a vmap
            return func(*args, **(kwargs or {}))
