"""The weights, gradients and optimizer state of the models that a program runs, by partition."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipesight._nested import tensors_in
from pipesight.recording.memory.saved_activations import addresses
from pipesight.recording.pipeline_description import Pipeline, is_pipeline, parts_of

__all__ = ["MetModels"]


class MetModels:
    """Models and optimizers, without keeping any of them alive. What no partition has is that of ``None``.

    Modules take long to list their weights, so those are looked up once a step.
    """

    def __init__(self) -> None:
        self._parts: dict[int | None, list[weakref.ref[nn.Module]]] = {}
        self._homes: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # parameters, and their partitions
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._weights: dict[int | None, tuple[list[weakref.ref[Tensor]], list[weakref.ref[Tensor]]]] = {}
        self._addresses: dict[int | None, dict[int, int]] = {}

    def meet_pipeline(self, pipeline: Pipeline) -> bool:
        """Learn of a pipeline that is called; return whether it is new."""
        new = False
        for j, part in parts_of(pipeline).items():
            if self._meet(j, part):
                self._homes |= {id(p): (weakref.ref(p), j) for p in part.parameters()}
                new = True
        return (isinstance(pipeline, nn.Module) and self._meet(None, pipeline)) or new  # what no partition has

    def meet_module(self, module: nn.Module) -> bool:
        """Learn of a module that is called from outside all others; return whether it is new."""
        return not is_pipeline(module) and self._meet(None, module)

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """Learn of an optimizer that has stepped."""
        self._optimizers.add(optimizer)

    def _meet(self, j: int | None, module: nn.Module) -> bool:
        known = [other for other in self._parts.get(j, []) if other() is not None]
        if any(other() is module for other in known):
            return False
        self._parts[j] = [*known, weakref.ref(module)]
        self.begin_step()
        return True

    def begin_step(self) -> None:
        """Look up anew what modules have."""
        self._weights.clear()
        self._addresses.clear()

    @property
    def partitions(self) -> list[int | None]:
        """Those that were met."""
        return [*self._parts]

    def weights(self, j: int | None) -> Iterator[Tensor]:
        """Yield parameters and buffers."""
        for own in self._looked_up(j):
            yield from (tensor for reference in own if (tensor := reference()) is not None)

    def weight_addresses(self, j: int | None) -> Collection[int]:
        """Return where the memory of parameters and buffers is."""
        found = self._addresses.get(j)
        if found is None:
            found = self._addresses[j] = addresses(self.weights(j))
        return found

    def gradients(self, j: int | None) -> Iterator[Tensor]:
        """Yield those that are in ``.grad``."""
        for reference in self._looked_up(j)[0]:
            if (parameter := reference()) is not None and parameter.grad is not None:
                yield parameter.grad

    def optimizer_state(self) -> Iterator[tuple[int | None, Tensor]]:
        """Yield partitions and the state of optimizers for their parameters."""
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                known = self._homes.get(id(parameter))
                home = known[1] if known is not None and known[0]() is parameter else None
                values: Any = state.values() if isinstance(state, dict) else (state,)
                for value in values:
                    if isinstance(value, Tensor):
                        yield home, value
                    else:
                        yield from ((home, tensor) for tensor in tensors_in(value))

    def _looked_up(self, j: int | None) -> tuple[list[weakref.ref[Tensor]], list[weakref.ref[Tensor]]]:
        """Return parameters and buffers."""
        found = self._weights.get(j)
        if found is None:
            modules = [module for reference in self._parts.get(j, ()) if (module := reference()) is not None]
            found = self._weights[j] = (
                [weakref.ref(p) for module in modules for p in module.parameters()],
                [weakref.ref(b) for module in modules for b in module.buffers()],
            )
        return found
