"""Hooks on the outputs of layers and on their gradients: called thousands of times a step, so they do little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from pipesight._torch.autograd import current_backward, hook_gradient, tensor_hooks
from pipesight._torch.tensors import in_transform, is_transformed, without_function_overrides
from pipesight.context import Where, current
from pipesight.stats.model_watch._compiled_part import CompiledPart
from pipesight.stats.model_watch._hook import Hook
from pipesight.stats.model_watch._readable import numbers
from pipesight.stats.recomputation import is_recomputing
from pipesight.stats.watched_tensor import Tap

__all__ = ["GradientHook", "OutputHook", "Watcher"]

KEY = -1  # of a gradient hook among those of its tensor
MOST_JOINED = 16  # layers that one hook serves


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
        outputs: What the output is logged as.
        gradient: What its gradient is logged by.
    """

    def __init__(self, watch: Watcher, outputs: tuple[Tap, ...], gradient: GradientHook | None) -> None:
        super().__init__(self._after_layer)
        self._watch, self._outputs, self._gradient = watch, outputs, gradient
        self._part: CompiledPart | None = None
        self._place = 0

    def belong_to(self, part: CompiledPart, place: int) -> None:
        """Note outputs where the layer is compiled as one of a part."""
        self._part, self._place = part, place

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Is called by the layer, with its arguments and its output; compiled code gets another output."""
        if is_compiling():
            return self._noted(module, args, output)
        where = current()
        if self._gradient is None and where is not None and where.phase == "recompute":
            return None
        if type(output) is not Tensor or not self._watch.inside or in_transform() or current_backward() != -1:
            return super().__call__(module, args, output)
        if where is not None and is_recomputing():
            return None
        self._take(output, where)
        gradient = self._gradient
        if gradient is not None and (gradient.tap.take is None or not gradient.is_quickly_on(output)):
            self._hook_gradients(gradient, (output,))
        return None

    def _noted(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Note an output in compiled code, if that can be; return what takes its place."""
        part, place, differentiates = self._part, self._place, self._gradient is not None
        if part is None:
            return super().__call__(module, args, output)
        if type(output) is Tensor:
            return part.note(place, output, differentiates=differentiates)
        if type(output) not in (tuple, list) or not all(item is None or type(item) is Tensor for item in output):
            return super().__call__(module, args, output)
        only_floats = any(item is not None and item.is_floating_point() for item in output)
        found = []
        for item in output:
            if item is not None and (item.is_floating_point() or not only_floats):
                item = part.note(place, item, differentiates=differentiates)
            found.append(item)
        return type(output)(found)

    def take_output(self, output: Tensor) -> None:
        """Log an output that compiled code has noted."""
        self._take(output, current())

    def take_gradient(self, gradient: Tensor) -> None:
        """Log a gradient that compiled code has noted."""
        if self._gradient is not None:
            self._gradient(gradient)

    def _take(self, output: Tensor, where: Where | None) -> None:
        with without_function_overrides():
            for tap in self._outputs:
                if (take := tap.take) is None or not take(output, tap.series, where):  # type: ignore[arg-type]
                    self._watch.log(tap, (output,))

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
        taps: What the gradient is logged as.
        as_it_is: Whether it is logged as it comes; else the watcher changes it first.
    """

    __slots__ = ("_as_it_is", "_joined", "_watch", "tap", "taps")

    def __init__(self, watch: Watcher, taps: tuple[Tap, ...], *, as_it_is: bool) -> None:
        self._watch, self._as_it_is, self.taps, self.tap = watch, as_it_is, taps, taps[0]
        self._joined: dict[GradientHook, GradientHook] = {}

    def __call__(self, gradient: Tensor) -> None:
        """Is called by the tensor."""
        is_plain = self._as_it_is and type(gradient) is Tensor and not is_transformed(gradient)
        where = current()
        for tap in self.taps:
            take = tap.take if is_plain else None
            if take is None or not take(gradient, tap.series, where):  # type: ignore[arg-type]
                self._watch.log_gradient(tap, gradient)

    def is_quickly_on(self, tensor: Tensor) -> bool:
        """Have it called with the gradient of a tensor, if no handle is needed to take it off again."""
        if hook_gradient(tensor, KEY, self):
            return True
        hooks = tensor_hooks(tensor)
        first = hooks.get(KEY) if hooks and len(hooks) == 1 else None
        if hooks is None or not isinstance(first, GradientHook) or not first._serves(self):
            return False
        hooks[KEY] = first._and(self)
        return True

    def put_on(self, tensor: Tensor) -> RemovableHandle | None:
        """Have it called with the gradient of a tensor. Return how to take it off again, if that is necessary."""
        if self.is_quickly_on(tensor):
            return None
        handle: RemovableHandle = tensor.register_hook(self)
        return handle if tensor.is_leaf else None

    def _serves(self, other: GradientHook) -> bool:
        return self._watch is other._watch and len(self.taps) < MOST_JOINED

    def _and(self, other: GradientHook) -> GradientHook:
        joined = self._joined.get(other)
        if joined is None:
            joined = self._joined[other] = GradientHook(self._watch, (*self.taps, *other.taps), as_it_is=self._as_it_is)
        return joined
