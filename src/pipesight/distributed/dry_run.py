"""Find out, without computing anything, what a call of a model sends from partition to partition.

Every rank has an outline of the model: a copy with parameters that have no memory. A call of it gives every rank the
same plan: which tensors cross each cut, and which partition uses which parameters. Units that are called for the
second time with arguments of the same shapes are not run: what they return is known.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipesight._nested import tensors_in
from pipesight._torch.autograd import around_functions
from pipesight._torch.module_internals import HOOK_TABLES, forward_hook_tables
from pipesight._torch.tensors import without_function_overrides
from pipesight.context import Where, enter_thread
from pipesight.distributed.dry_walk import DryWalk, KnownWay
from pipesight.distributed.model_plan import Plan
from pipesight.distributed.model_walk import Doors, ModelCall, UnitResult, signature
from pipesight.distributed.outline_state import OutlineState
from pipesight.distributed.random_detector import RandomDetector
from pipesight.distributed.stand_ins import META
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.randomness import PassRandomness, isolated

__all__ = ["ModelOutline"]


class ModelOutline:
    """A model without its memory, and the plans of its calls."""

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
        run: ModelCall,
        surroundings: Any,
        i: int,
        randomness: PassRandomness,
        *,
        anew: bool = False,
    ) -> Plan:
        """Return what a call does.

        ``run`` calls the model, and makes of its output what is wanted, such as the loss; ``surroundings`` is what
        :meth:`follow` returned. ``anew`` finds it out for these very values of the arguments.
        """
        if len(self._known) > self._REMEMBERED:
            self._known.clear()
        known = self._known.setdefault((signature(call), run, surroundings), [])
        if known and not known[0].reads and not anew:
            return known[0]
        walk = functools.partial(self._walk, call, run, surroundings, i, randomness)
        state = OutlineState(self._pairs)
        try:
            plan = walk([] if anew else known)
        except KnownWay as found:
            return found.plan
        self.made += 1
        if not any(plan.reads == other.reads for other in known):
            # All units have been called; now once more with what is known of them, as later calls go.
            state.note()
            try:
                again = walk([])
                if not _alike(again, plan) and state.take_over():
                    again, plan = walk([]), again
                alike = _alike(again, plan)
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
        run: ModelCall,
        surroundings: Any,
        i: int,
        randomness: PassRandomness,
        known: Sequence[Plan],
    ) -> Plan:
        """Call the outline; raise :class:`KnownWay` as soon as it is sure to do what one of some plans says."""
        walk = DryWalk(self, self._cuts, self._device, i, randomness, surroundings, self._results)
        walk.candidates = list(known)
        inside = Where()
        inside.phase = "forward"  # so that hooks on all modules, those of tracing among them, ignore this
        enter_thread(inside)
        detector = RandomDetector()
        self.doors.walk = walk
        flat = flatten(call)
        own = [tensor.detach().clone() for tensor in flat.tensors]  # the model may change them, and will do so again
        args, kwargs = flat.rebuild(own)
        try:
            with isolated(), detector, walk, around_functions(walk.call_function):
                output = run(self.module, args, kwargs)
                with without_function_overrides():
                    walk.end(output)
        except Exception as error:
            error.add_note(f"in partition {walk.j}, while its shapes were found out with tensors that have no values")
            if hooked := [name for name in self.doors.units if self.has_hooks(name)]:
                error.add_note(
                    f"there are hooks, on {hooked[0]!r} for one: what they put into the model, not all ranks see; let "
                    "its forward return that instead"
                )
            raise
        finally:
            self.doors.walk = None
            walk.end_stream()
            inside.phase = None
        walk.random = walk.random or detector.seen
        walk.changes = {k for k, tensor in enumerate(own) if tensor._version or walk.is_written(tensor)}
        return walk.plan(self.partitions)


def _alike(one: Plan, other: Plan) -> bool:
    return (one.cuts, one.counts) == (other.cuts, other.counts)


def _hollow(model: nn.Module) -> nn.Module:
    """Copy a model without the memory of its parameters and without hooks; buffers keep their values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=META)
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for child in model.modules():
        for tensor in tensors_in([value for value in vars(child).values() if not isinstance(value, nn.Module)]):
            if not tensor.is_leaf:  # left by a call, with its graph, which cannot be copied
                memo[id(tensor)] = tensor.detach().clone()
        for name in HOOK_TABLES:
            hooks = child.__dict__.get(name)
            if hooks:  # those that others have put there belong to the model: it may read what they collect
                memo[id(hooks)] = type(hooks)({k: hook for k, hook in hooks.items() if not _is_ours(hook)})
    return copy.deepcopy(model, memo)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] == "pipesight"
