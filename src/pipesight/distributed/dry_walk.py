"""One call of a model's outline: note what each partition uses of earlier ones, and of the model.

Units are called once for each kind of arguments; what they return is known from then on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipesight._nested import map_tensors, tensors_in
from pipesight._torch.tensors import with_function_overrides, without_function_overrides
from pipesight.distributed.loss_weights import LossMeans, Mean
from pipesight.distributed.model_plan import Crossing, Plan, PlannedCut
from pipesight.distributed.model_walk import Call, Name, UnitResult, Walk, signature
from pipesight.distributed.random_detector import RandomDetector
from pipesight.distributed.stand_ins import META, ValueNeededError, place
from pipesight.pipeline.checkpoint import versions_of
from pipesight.pipeline.flattening import Flat, flatten
from pipesight.pipeline.randomness import PassRandomness

if TYPE_CHECKING:
    from pipesight.distributed.dry_run import ModelOutline

__all__ = ["DryWalk", "KnownWay"]


class DryWalk(Walk):
    """A call of the outline.

    ``surroundings`` are what plans depend on besides arguments. ``results`` are what is known of units; the walk adds
    to it.
    """

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
        self.means: tuple[Mean, ...] = ()
        self._means = LossMeans()
        self._keys: dict[tuple[int, int], Any] = {}
        self._crossing: dict[Name, Crossing] = {}
        self._ways: dict[Name, int] = {}  # to what is made inside units
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
                raise KnownWay(plan)

    def note(self, tensor: Tensor, k: int) -> None:
        """Name a tensor, and remember the way to it."""
        super().note(tensor, k)
        if self.unit is not None:
            self._ways[self.names[id(tensor)]] = self.way

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
                way = self._ways.get(name, 0)
                self._crossing[name] = Crossing(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, way)

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
        self.enter_unit(unit)
        self._given = {id(tensor) for tensor in tensors_in(given)}
        self._outside, self._inside = False, set()
        real = [tensor for tensor in tensors_in(given) if not tensor.is_meta]
        versions = versions_of(real)
        arguments = flatten(given)  # as they are now: a cache grows in the call
        before = versions_of(arguments.tensors)
        detector, means = RandomDetector(), len(self._means)
        needs_values: ValueNeededError | None = None
        try:
            with detector, with_function_overrides():
                output = call(*given[0], **given[1])
        except ValueNeededError as error:
            needs_values = error
            with detector:
                output, left = self._run_on_zeros(unit, arguments, error)
            if left != _changes(flatten(given), arguments.tensors, before):
                needs_values.add_note(
                    f"'{unit}' changes what it is given after it has asked for them; if that is a cache, call the "
                    "model without one: use_cache=False"
                )
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
        self.means = self._means.of(output)

    def plan(self, partitions: int) -> Plan:
        """Return what was found out."""
        cuts = []
        for k in range(partitions + 1):
            later: set[Name] = set().union(*self.needs[k:])
            names = sorted(name for name in later if name[0] < k)
            cuts.append(PlannedCut(tuple(self._crossing[name] for name in names)))
        units = [[unit for unit, j in self.called.items() if j == k] for k in range(partitions)]
        findings = (self.counts, self.watched, self.results, self.used, self.random, self.reads)
        return Plan(cuts, self.needs, *findings, units, self.changes, self.means)


class KnownWay(BaseException):
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
