"""Gradients of one mini-batch: run a local graph, sum over micro-batches, and call hooks once for the sum."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipesight._torch.autograd import (
    add_each,
    backward_accumulates,
    current_backward,
    multiply_each,
    post_accumulate_hooks,
    run_backward,
    tensor_hooks,
)
from pipesight._torch.tensors import is_view

__all__ = ["GradientSum", "OutputGradients", "expect_no_gradient", "run_graph", "silence_hooks"]


@dataclass(slots=True)
class OutputGradients:
    """The gradients of the gathered outputs of a pipeline; on a GPU, when they are ready."""

    gradients: list[Tensor | None]
    ready: torch.cuda.Event | None = None


class GradientSum:
    """Sums gradients by parameter, in the order in which they arrive."""

    def __init__(self) -> None:
        # By id: hashing a tensor goes through Python code.
        self._parameters: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._owned: set[int] = set()
        self._usual: tuple[list[int], list[Tensor]] = [], []
        """The ids of parameters that were added to together, and their sums: most micro-batches have the same ones."""

    def add(self, parameters: Iterable[Tensor], gradients: list[Tensor | None]) -> None:
        """Add one gradient per parameter, and empty the list, so that no gradient outlives its addition."""
        parameters = list(parameters)
        keys = list(map(id, parameters))
        if keys == self._usual[0] and keys and not any(map(operator.is_, gradients, itertools.repeat(None))):
            add_each(self._usual[1], gradients)  # type: ignore[arg-type]
            gradients[:] = [None] * len(gradients)
            return
        sums, terms = [], []
        for k, parameter in enumerate(parameters):
            gradient, gradients[k] = gradients[k], None
            if gradient is None:
                continue
            key = id(parameter)
            if key not in self._sums:
                # As autograd left it: it may be expanded, or be the gradient of another parameter too.
                self._parameters[key], self._sums[key] = parameter, gradient
            elif key not in self._owned:
                self._sums[key] = self._sums[key] + gradient
                self._owned.add(key)
            else:
                sums.append(self._sums[key])
                terms.append(gradient)
        if sums:
            add_each(sums, terms)
        if len(sums) == len(keys):
            self._usual = keys, sums

    def tensors(self) -> list[Tensor]:
        """Return the sums so far."""
        return list(self._sums.values())

    def merge(self, other: GradientSum) -> None:
        """Add all of another sum, and empty that one."""
        gradients: list[Tensor | None] = list(other._sums.values())
        other._sums.clear()
        other._usual = [], []
        self._owned |= other._owned - self._sums.keys()
        self.add(other._parameters.values(), gradients)

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply all sums by a number, which may be on a GPU."""
        if factor == 1 if isinstance(factor, float) else not self._sums:
            return
        self._usual = [], []
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for key, total in self._sums.items():
            if key not in self._owned:
                self._sums[key] = total.clone()
                self._owned.add(key)
            alike.setdefault((total.device, total.dtype), []).append(self._sums[key])
        for (device, dtype), totals in alike.items():
            wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
            multiply_each(totals, factor.to(device, wide) if isinstance(factor, Tensor) else factor)

    def take(self, parameter: Tensor) -> Tensor | None:
        """Remove and return the sum for ``parameter``."""
        self._usual = [], []
        total = self._sums.pop(id(parameter), None)
        # A lone term can be a view of the caller's own gradient, which must not become `parameter.grad`.
        if total is not None and id(parameter) not in self._owned and is_view(total):
            total = total.clone()
        return total

    def take_all(self) -> list[tuple[Tensor, Tensor]]:
        """Remove and return all parameters and their sums."""
        found = [(parameter, self.take(parameter)) for parameter in [self._parameters[key] for key in self._sums]]
        return [(parameter, total) for parameter, total in found if total is not None]

    def accumulate(self) -> None:
        """Add what has not been taken to the ``.grad`` of its parameters, and call their hooks.

        Forward did not see that these are used, so they are not inputs of our node in the caller's graph.
        """
        late = [self._parameters[key] for key in self._sums]
        if not late:
            return
        if not backward_accumulates():
            raise RuntimeError(
                "a parameter that is used only inside torch.utils.checkpoint(use_reentrant=True) gets a gradient only "
                "from .backward() without inputs=, not from torch.autograd.grad; set use_reentrant=False"
            )
        torch.autograd.backward(late, [self.take(parameter) for parameter in late])


class _PerThread(threading.local):
    inside = False  # of a partition's backward


_here = _PerThread()


def run_graph(
    ends: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[GradientEdge | Tensor], *, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of ``inputs``, given those at the ends of a local graph.

    Hooks that :func:`silence_hooks` went over do not fire.
    """
    edges, gradients = zip(*ends, strict=True)
    _here.inside = True
    try:
        found = run_backward(edges, gradients, inputs, keep_graph=retain)
    finally:
        _here.inside = False
    return list(found)


def silence_hooks(parameters: Iterable[Tensor]) -> None:
    """Make the hooks of parameters wait for the gradient of the whole mini-batch, and skip them if there is none.

    Autograd calls those of ``Tensor.register_hook`` wherever a gradient reaches the parameter, also for one micro-batch
    inside a partition. And it calls all of them for every parameter that some output depends on, also if the caller's
    loss leaves that output out.
    """
    backward = current_backward()
    for parameter in parameters:
        for hooks, kind in ((tensor_hooks(parameter), _WaitingHook), (post_accumulate_hooks(parameter), _AfterHook)):
            if hooks:
                for key, hook in list(hooks.items()):
                    if not isinstance(hook, kind):
                        hooks[key] = hook = kind(hook)
                    hook.begin(backward)


def expect_no_gradient(parameters: Iterable[Tensor]) -> None:
    """Tell hooks that these parameters get no gradient from the pipeline, though perhaps from elsewhere."""
    for parameter in parameters:
        for hook in (post_accumulate_hooks(parameter) or {}).values():
            if isinstance(hook, _AfterHook):
                hook.before = _state_of(parameter.grad)


class _WaitingHook:
    """A hook of ``Tensor.register_hook`` that does nothing inside partitions but note that it was called."""

    def __init__(self, hook: Callable[[Tensor | None], Tensor | None]) -> None:
        functools.update_wrapper(self, hook, updated=())
        self._hook = hook
        # This one counts the calls of its siblings, and expects one for each parameter that autograd reaches.
        self._counts = str(getattr(hook, "__qualname__", "")).startswith("register_multi_grad_hook.")
        self._backward, self._reached = -1, False

    def begin(self, backward: int) -> None:
        """Forget what was noted in another backward. That may never have called this: torch.autograd.grad does not."""
        if backward != self._backward:
            self._backward, self._reached = backward, False

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if _here.inside:
            self._reached = True
            return None
        reached, self._reached = self._reached, False
        return self._hook(gradient) if reached or self._counts or gradient is not None else None


class _AfterHook:
    """A hook of ``register_post_accumulate_grad_hook`` that does nothing if nothing was accumulated."""

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        functools.update_wrapper(self, hook, updated=())
        self._hook = hook
        self._backward = -1
        self.before: tuple[Tensor | None, int] | None = None

    def begin(self, backward: int) -> None:
        """Forget what was noted in another backward."""
        if backward != self._backward:
            self._backward, self.before = backward, None

    def __call__(self, parameter: Tensor) -> None:
        before, self.before = self.before, None
        grad, version = _state_of(parameter.grad)
        if before is None or grad is not before[0] or version != before[1]:
            self._hook(parameter)


def _state_of(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return grad, 0 if grad is None else grad._version
