"""Run a partition so that it can be run again: with the same inputs, random numbers and buffers. For both engines.

`run_layers` is every forward, `Checkpointer.forward` one that is checkpointed, `Checkpointer.recompute` the second
one. ::

    forward     save buffers ──> run_layers, keep the states of generators ──> drop the activations
    backward    replay buffers ──> run_layers with these states ──> the real buffers again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pipesight._torch.module_internals import BatchNorm
from pipesight.context import Unrepeatable, Where
from pipesight.pipeline.randomness import PassRandomness, SavedGenerators, Task, begin_task, end_task
from pipesight.pipeline.skip import SkipTracker, use_tracker

__all__ = ["Buffers", "Checkpoint", "Checkpointer", "changes_input", "run_layers", "versions_of"]

R = TypeVar("R")


@dataclass(slots=True)
class Checkpoint:
    """What it takes to run a forward again."""

    inputs: Sequence[Tensor | None]
    versions: list[int | None]
    buffers: SavedBuffers
    generators: SavedGenerators | None = None  # until the first run has ended

    def check_inputs(self) -> None:
        """Raise if the inputs have been changed since."""
        if versions_of(self.inputs) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                "input of a checkpointed partition, after its forward; clone() it first, or use checkpoint='never'"
            )


def run_layers(
    layers: Callable[[Any], Any],
    value: Any,
    randomness: PassRandomness,
    task: Task,
    *,
    tracker: SkipTracker | None = None,
    checkpoint: Checkpoint | None = None,
) -> Any:
    """Return the output of a partition, which draws from the random stream of its task.

    Args:
        layers: The partition.
        value: Its input.
        randomness: That of the pass.
        task: Micro-batch, partition and phase.
        tracker: Has the skips that arrive, and takes those that leave; ``None`` if there are none.
        checkpoint: The first run fills it, the next ones repeat what it holds.
    """
    begin_task(randomness, task, None if checkpoint is None else checkpoint.generators)
    try:
        if tracker is None:
            output = layers(value)
        else:
            with use_tracker(tracker):
                output = layers(value)
    finally:
        generators = end_task()
    if checkpoint is not None and checkpoint.generators is None:
        checkpoint.generators = generators
    return output


def versions_of(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Return a number for each tensor that changes when the tensor is changed in place."""
    return [None if t is None or t.is_inference() else t._version for t in tensors]


class Checkpointer:
    """Runs the checkpointed forwards of one partition, and lets them be repeated."""

    def __init__(self, partition: nn.Module) -> None:
        self._buffers = Buffers(partition)
        self.allowed = True
        """No layer has called `current_microbatch`: what bypasses the engine cannot be recomputed."""

    def forward(
        self, run: Callable[[Checkpoint], R], inputs: Sequence[Tensor | None], where: Where, *, changed: str
    ) -> tuple[R, Checkpoint] | None:
        """Run a forward that will be repeated; return what ``run`` does.

        If a layer calls `current_microbatch`, return ``None``. The caller then runs the same forward without a
        checkpoint; up to that call, it counts as a recomputation.

        Args:
            run: Runs the layers, with :func:`run_layers` and this checkpoint.
            inputs: What the layers take.
            where: That of the thread.
            changed: What to raise if the inputs are changed in place.
        """
        checkpoint = Checkpoint(inputs, versions_of(inputs), self._buffers.save())
        try:
            result = run(checkpoint)
        except Unrepeatable:
            self._buffers.restore(checkpoint.buffers)
            self.allowed = where.checkpointing = False
            where.phase, where.repeating = "recompute", True
            where.marks = []
            return None
        self._buffers.learn(checkpoint.buffers)
        if versions_of(inputs) != checkpoint.versions:
            raise RuntimeError(changed)
        return result, checkpoint

    def recompute(self, run: Callable[[Checkpoint], R], checkpoint: Checkpoint) -> R:
        """Run the forward again, with the buffers that the first one saw; return what ``run`` does."""
        resume = self._buffers.replay(checkpoint.buffers)
        try:
            with torch.enable_grad():
                return run(checkpoint)
        finally:
            resume()


Place: TypeAlias = tuple[nn.Module, str]
"""A buffer or parameter, by its module and name there."""


@dataclass(slots=True)
class SavedBuffers:
    """Copies of the buffers before a forward, or only their versions for large ones."""

    values: dict[Place, Tensor | None]
    watched: dict[Place, tuple[Tensor, int]]
    absent: list[Place]  # registered only by that forward
    parameters: dict[Place, nn.Parameter]  # themselves, as a forward may put others there


class Buffers:
    """Shows a recomputation the buffers that the first forward saw, and undoes what it changes.

    A recomputation must see the values that the first forward saw, and must not update them again. For batch
    normalisation, tracking is switched off. Other buffers are copied before each checkpointed forward: small ones
    always, large ones, which are mostly constants, once they have been seen to change. So are parameters that a forward
    changes or replaces, as those of a codebook.
    """

    _SMALL = 4096

    def __init__(self, partition: nn.Module) -> None:
        self._partition = partition
        self._changing: set[Place] | None = None

    def save(self) -> SavedBuffers:
        """Return copies of the buffers that the next forward may change: all of them, the first time."""
        saved = SavedBuffers({}, {}, [], {})
        for place in self._places():
            buffer = _table(place)[place[1]]
            if self._changing is None or buffer is None or buffer.numel() <= self._SMALL or place in self._changing:
                saved.values[place] = None if buffer is None else buffer.detach().clone()
                if isinstance(buffer, nn.Parameter):
                    saved.parameters[place] = buffer
            else:
                saved.watched[place] = buffer, buffer._version
        return saved

    def learn(self, saved: SavedBuffers) -> None:
        """Note which large buffers the forward changed, and keep in ``saved`` only what a recomputation needs."""
        if self._changing is None:
            self._changing = set()
            seen = set(saved.values)
            for place, before in list(saved.values.items()):
                if _tracked(*place):
                    del saved.values[place]
                elif place[1] in place[0]._parameters or (before is not None and before.numel() > self._SMALL):
                    if _differ(before, _table(place)[place[1]]):
                        self._changing.add(place)
                    else:
                        del saved.values[place]
                        saved.parameters.pop(place, None)
            for module, name in set(self._places()) - set(saved.values):
                buffer = _table((module, name))[name]
                if (module, name) not in seen and buffer is not None:
                    saved.absent.append((module, name))
        for place, (before, version) in saved.watched.items():
            after = place[0]._buffers[place[1]]
            if after is not before or before._version != version:
                # Too late for its value, but not for a second update.
                self._changing.add(place)
                saved.values[place] = before.detach().clone()
        saved.watched.clear()

    def restore(self, saved: SavedBuffers) -> None:
        """Put the values in ``saved`` back, as if the forward had not run."""
        with torch.no_grad():
            for place, before in saved.values.items():
                buffer = _table(place)[place[1]]
                if before is None or buffer is None:
                    _table(place)[place[1]] = before
                elif _differ(before, buffer):
                    buffer.copy_(before)

    def replay(self, saved: SavedBuffers, *, same_operators: bool = False) -> Callable[[], None]:
        """Put the values in ``saved`` in place for a recomputation; return a function that puts the real ones back.

        ``same_operators`` lets batch normalisation track, in copies that are thrown away: without tracking, it saves
        other tensors for backward.
        """
        now = {place: _table(place)[place[1]] for place in (*saved.values, *saved.absent)}
        norms = [m for m in self._partition.modules() if isinstance(m, BatchNorm) and m.training]
        norms = [m for m in norms if m.track_running_stats]
        if same_operators:
            for norm in norms:
                for name, buffer in norm._buffers.items():
                    if _tracked(norm, name) and buffer is not None:
                        now[norm, name] = buffer
                        norm._buffers[name] = buffer.clone()
            norms = []
        for (module, name), before in saved.values.items():
            value = None if before is None else before.clone()
            parameter = saved.parameters.get((module, name))
            if parameter is not None and value is not None:
                learns = parameter.requires_grad and not same_operators  # the graph of this must lead to itself
                if now[module, name] is not parameter or learns:
                    value = parameter
                else:
                    value = nn.Parameter(value, parameter.requires_grad)
            _table((module, name))[name] = value
        for module, name in saved.absent:
            del module._buffers[name]
        for norm in norms:
            norm.track_running_stats = False

        def resume() -> None:
            for norm in norms:
                norm.track_running_stats = True
            for place, buffer in now.items():
                _table(place)[place[1]] = buffer

        return resume

    def _places(self) -> list[Place]:
        places = [(module, name) for module in self._partition.modules() for name in module._buffers]
        if self._changing is None:
            parameters = [(m, name, p) for m in self._partition.modules() for name, p in m._parameters.items()]
            return places + [(m, name) for m, name, p in parameters if type(p) is nn.Parameter and not p.is_meta]
        learned = [place for place in self._changing if place[1] in place[0]._parameters]
        return learned + [place for place in places if not _tracked(*place)]


def _table(place: Place) -> dict[str, Any]:
    """Return the table of a module that has a buffer or parameter."""
    module, name = place
    return module._parameters if name in module._parameters else module._buffers


def _tracked(module: nn.Module, name: str) -> bool:
    """Return whether a buffer is one that batch normalisation does not update when it does not track."""
    return isinstance(module, BatchNorm) and name in ("running_mean", "running_var", "num_batches_tracked")


def _differ(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None:
        return before is not after
    return not (before.shape == after.shape and before.dtype == after.dtype and torch.equal(before, after))


def changes_input(partition: nn.Module, seen_not_to: bool) -> bool:
    """Return whether a partition may change its input in place, by the attribute ``inplace`` of its layers.

    The attribute of the first layer decides. A later layer may get the same tensor, if those before it pass it through;
    that is assumed until the input has been seen to stay unchanged (``seen_not_to``).
    """
    first = next(partition.children(), partition)
    return any(getattr(m, "inplace", False) is True for m in (first if seen_not_to else partition).modules())
