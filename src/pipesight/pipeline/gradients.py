"""Gradients of one mini-batch: those that come in at the outputs, and those of the parameters, summed up."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node

__all__ = ["GradientSum", "OutputGradients", "find_leaves", "run_graph", "silence_hooks"]


@dataclass(slots=True)
class OutputGradients:
    """The gradients of the gathered outputs of a pipeline; on a GPU, when they are ready."""

    gradients: list[Tensor | None]
    ready: torch.cuda.Event | None = None


class GradientSum:
    """Adds up gradients by parameter, in the order in which they come."""

    def __init__(self) -> None:
        # By id: hashing a tensor goes through Python code.
        self._parameters: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._owned: set[int] = set()

    def add(self, parameters: Iterable[Tensor], gradients: list[Tensor | None]) -> None:
        """Add one gradient a parameter, and empty the list, so that no gradient outlives its addition."""
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
            torch._foreach_add_(sums, terms)

    def merge(self, other: GradientSum) -> None:
        """Add all of another sum, and forget it there."""
        gradients: list[Tensor | None] = list(other._sums.values())
        other._sums.clear()
        self._owned |= other._owned - self._sums.keys()
        self.add(other._parameters.values(), gradients)

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return the sum for ``parameter`` and forget it."""
        total = self._sums.pop(id(parameter), None)
        # A lone term can be a view of the caller's own gradient, which must not become `parameter.grad`.
        if total is not None and id(parameter) not in self._owned and total._is_view():
            total = total.clone()
        return total


class _PerThread(threading.local):
    inside = False  # of a partition's backward


_here = _PerThread()


def run_graph(
    ends: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[GradientEdge | Tensor], *, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of ``inputs``, given those at the ends of a local graph.

    This is ``torch.autograd.grad`` less its checks, which take as long as the backward of a small layer. Hooks that
    :func:`silence_hooks` went over do not fire.
    """
    edges, gradients = zip(*ends, strict=True)
    _here.inside = True
    try:
        found = Variable._execution_engine.run_backward(
            edges, gradients, retain, False, tuple(inputs), True, accumulate_grad=False
        )
    finally:
        _here.inside = False
    return list(found)


def silence_hooks(parameters: Iterable[Tensor]) -> None:
    """Let the hooks of ``Tensor.register_hook`` wait for the gradient of the whole mini-batch.

    Autograd calls them wherever a gradient reaches the parameter, also for one micro-batch inside a partition.
    """
    for parameter in parameters:
        hooks = parameter._backward_hooks
        if hooks:
            for key, hook in list(hooks.items()):
                if not isinstance(hook, _WaitingHook):
                    hooks[key] = _WaitingHook(hook)


class _WaitingHook:
    """A parameter hook that keeps still inside of partitions."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        functools.update_wrapper(self, hook, updated=())
        self._hook = hook

    def __call__(self, gradient: Tensor) -> Tensor | None:
        return None if _here.inside else self._hook(gradient)


def find_leaves(ends: Iterable[GradientEdge | None], roots: Iterable[GradientEdge | None]) -> set[Tensor]:
    """Return the tensors that a local graph, from its ends down to its roots, has gradients for."""
    seen: set[Node] = {root.node for root in roots if root is not None}
    stack: list[Any] = [end.node for end in ends if end is not None]
    leaves: set[Tensor] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        parents = node.next_functions
        if parents:
            stack += [parent for parent, _ in parents if parent is not None]
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
    return leaves
