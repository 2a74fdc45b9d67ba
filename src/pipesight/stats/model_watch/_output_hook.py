"""Hooks on the outputs of layers and on their gradients: called thousands of times a step, so they do little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from pipesight._torch.autograd import hook_gradient, in_backward, tensor_hooks
from pipesight._torch.tensors import in_transform
from pipesight.context import Where, current
from pipesight.stats.model_watch._hook import Hook
from pipesight.stats.model_watch._readable import numbers
from pipesight.stats.recomputation import is_recomputing
from pipesight.stats.watched_tensor import Tap

__all__ = ["GradientHook", "OutputHook", "Watcher"]

KEY = -1  # of a gradient hook among those of its tensor
MOST_JOINED = 16  # layers that one hook serves

PutAside: TypeAlias = Callable[[Tap, Tensor, Where | None], bool]


class Watcher(Protocol):
    """Who logs the tensors.

    Attributes:
        inside: Whether a call of the model is under way that counts; None if there is none.
    """

    inside: bool | None

    def counted(self) -> bool:
        """Whether the forward of a layer is logged."""

    def differentiates(self, gradient: GradientHook) -> bool:
        """Whether a gradient of this forward will be logged."""

    def log(self, tap: Tap, tensors: Sequence[Tensor]) -> None:
        """Log tensors of a forward."""

    def log_gradient(self, tap: Tap, gradient: Tensor) -> None:
        """Log a gradient."""

    def hook_gradient(self, gradient: GradientHook, tensor: Tensor) -> None:
        """Have the gradient of a tensor logged."""


class OutputHook(Hook):
    """Logs the output of a layer, and has its gradient logged.

    Args:
        watch: Who logs.
        put_aside: Has a tensor measured with others, or returns False.
        outputs: What the output is logged as.
        gradient: What its gradient is logged by.
    """

    def __init__(
        self,
        watch: Watcher,
        put_aside: PutAside,
        outputs: tuple[Tap, ...],
        gradient: GradientHook | None,
    ) -> None:
        super().__init__(self._after_layer)
        self._watch, self._put_aside, self._outputs, self._gradient = watch, put_aside, outputs, gradient
        self._first = outputs[0] if gradient is None or outputs else gradient.tap

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Is called by the layer, with its arguments and its output."""
        if (
            is_compiling()
            or type(output) is not Tensor
            or not (self._watch.inside and self._first.is_fast)
            or in_transform()
            or in_backward()
        ):
            super().__call__(module, args, output)
            return
        where = current()
        if where is not None and is_recomputing():
            return
        for tap in self._outputs:
            if not (tap.is_fast and self._put_aside(tap, output, where)):
                self._watch.log(tap, (output,))
        gradient = self._gradient
        if (
            gradient is not None
            and output.requires_grad
            and not (gradient.tap.is_fast and hook_gradient(output, KEY, gradient))
        ):
            self._hook_gradients(gradient, (output,))

    def _after_layer(self, _: nn.Module, args: Any, output: Any) -> None:
        tensors = numbers(output)
        if self._outputs and self._watch.counted():
            for tap in self._outputs:
                self._watch.log(tap, tensors)
        if self._gradient is not None:
            self._hook_gradients(self._gradient, tensors)

    def _hook_gradients(self, gradient: GradientHook, tensors: Sequence[Tensor]) -> None:
        if self._watch.differentiates(gradient):
            for tensor in tensors:
                if tensor.requires_grad:
                    self._watch.hook_gradient(gradient, tensor)


class GradientHook:
    """Is called with the gradient of a tensor. One hook serves several layers that return the same tensor.

    Args:
        watch: Who logs.
        put_aside: Has a gradient measured with others, or returns False.
        taps: What the gradient is logged as.
    """

    __slots__ = ("_joined", "_put_aside", "_watch", "tap", "taps")

    def __init__(self, watch: Watcher, put_aside: PutAside, *taps: Tap) -> None:
        self._watch, self._put_aside, self.taps, self.tap = watch, put_aside, taps, taps[0]
        self._joined: dict[GradientHook, GradientHook] = {}

    def __call__(self, gradient: Tensor) -> None:
        """Is called by the tensor."""
        where = current()
        for tap in self.taps:
            if not (tap.is_fast and type(gradient) is Tensor and self._put_aside(tap, gradient, where)):
                self._watch.log_gradient(tap, gradient)

    def put_on(self, tensor: Tensor) -> RemovableHandle | None:
        """Have it called with the gradient of a tensor. Return how to take it off again, if that is necessary."""
        if hook_gradient(tensor, KEY, self):
            return None
        hooks = tensor_hooks(tensor)
        first = hooks.get(KEY) if hooks and len(hooks) == 1 else None
        if hooks is not None and isinstance(first, GradientHook) and first._serves(self):
            hooks[KEY] = first._and(self)
            return None
        handle: RemovableHandle = tensor.register_hook(self)
        return handle if tensor.is_leaf else None

    def _serves(self, other: GradientHook) -> bool:
        return self._watch is other._watch and len(self.taps) < MOST_JOINED

    def _and(self, other: GradientHook) -> GradientHook:
        joined = self._joined.get(other)
        if joined is None:
            joined = self._joined[other] = GradientHook(self._watch, self._put_aside, *self.taps, *other.taps)
        return joined
