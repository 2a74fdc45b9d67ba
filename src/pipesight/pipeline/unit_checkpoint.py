"""Run a unit of a model so that it can be run again: what it saves for backward is dropped, and recomputed there.

The unit's own autograd graph stays, with a number in place of each saved tensor. ::

    forward     saved tensors ──> numbers        the unit's arguments are kept instead
    recompute   run the unit again ──> saved tensors, in the same order
    backward    number ──> saved tensor
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipesight import context
from pipesight._torch.autograd import next_sequence_number
from pipesight.pipeline.attribute_access import used
from pipesight.pipeline.attributes import Attributes
from pipesight.pipeline.checkpoint import Buffers, SavedBuffers, versions_of
from pipesight.pipeline.flattening import flatten
from pipesight.pipeline.randomness import PassRandomness, SavedGenerators, Task, begin_task, end_task

__all__ = ["UnitCheckpoint"]


class UnitCheckpoint:
    """One call of a unit that will be repeated."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        buffers: Buffers,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        randomness: PassRandomness,
        task: Task,
        attributes: Attributes | None = None,
    ) -> None:
        self._written = None if attributes is None else attributes.values()
        self._name, self._module, self._buffers = name, module, buffers
        self._arguments = flatten((args, dict(kwargs)))  # as they are now: a cache may grow in the call
        self._randomness, self._task = randomness, task
        self._generators: SavedGenerators = {}
        self._tensors = self._arguments.tensors
        self._versions = versions_of(self._tensors)
        self._saved: SavedBuffers = buffers.save()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._shapes: list[torch.Size] = []
        self._values: list[Tensor | None] = []
        self._keep = False
        self._hooks: saved_tensors_hooks | None = None

    def begin(self) -> None:
        """Drop, from now on, what this thread saves for backward."""
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def end(self, generators: SavedGenerators | None) -> None:
        """Stop it. ``generators`` is what the unit has drawn from; ``None`` if it has failed."""
        assert self._hooks is not None
        self._hooks.__exit__()
        self._hooks = None  # it refers to this object, which would live until the garbage collector comes
        if generators is None:
            return
        self._generators = generators
        self._buffers.learn(self._saved)
        if versions_of(self._tensors) != self._versions:
            raise RuntimeError(
                f"'{self._name}' changed one of its arguments in place, so that it cannot be recomputed; use "
                "inplace=False there, or checkpoint='never'"
            )

    def recompute(self, *, keep: bool) -> None:
        """Run the unit again for what it saved; ``keep`` it after it has been used, for another backward."""
        where = context.current()
        if versions_of(self._tensors) != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"argument of '{self._name}', which is checkpointed, after its forward; clone() it first, or use "
                "checkpoint='never'"
            )
        self._keep = keep
        found: list[Tensor | None] = []
        resume = self._buffers.replay(self._saved, same_operators=True)
        if where is not None and where.phase == "recompute":
            where.layer = self._name
            where.marks.append((next_sequence_number(), self._name))
            where.observers.layer_started(where)
        begin_task(self._randomness, self._task, self._generators)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                if self._written is not None:
                    stack.enter_context(used(self._written))
                for state in self._autocast:
                    kind, enabled, dtype = state
                    if state != (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                        stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
                stack.enter_context(saved_tensors_hooks(lambda t: found.append(t.detach()), _refuse))
                args, kwargs = self._arguments.rebuild(self._tensors)
                self._module(*args, **kwargs)
        finally:
            end_task()
            resume()
        if where is not None and where.phase == "recompute":
            where.observers.layer_ended(where)
            where.layer = None
        if [t.shape for t in found if t is not None] != self._shapes:
            raise RuntimeError(
                f"'{self._name}' saved other tensors for backward when it was recomputed than in its forward "
                f"({len(found)} and {len(self._shapes)}, or of other shapes): what it computes must depend on nothing "
                "but its arguments, weights and random numbers; use checkpoint='never'"
            )
        self._values = found

    @property
    def arguments(self) -> Sequence[Tensor]:
        """The tensors among the arguments of the call."""
        return self._tensors

    def saved(self) -> tuple[str, Sequence[Tensor], Sequence[Tensor | None]]:
        """Return the unit's name, its arguments, and what its recomputation has saved and nobody has used yet."""
        return self._name, self._tensors, self._values

    def _pack(self, tensor: Tensor) -> int:
        self._shapes.append(tensor.shape)
        return len(self._shapes) - 1

    def _unpack(self, number: int) -> Tensor:
        if not self._values or self._values[number] is None:  # it was used and dropped
            self.recompute(keep=self._keep)
        value = self._values[number]
        assert value is not None
        if not self._keep:
            self._values[number] = None
        return value


def _refuse(_: object) -> Tensor:
    raise AssertionError("the graph of a recomputation is not differentiated")
