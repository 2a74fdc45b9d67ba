"""What PyTorch and Python keep of the thread that calls a pipeline, for its workers to run under."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from pipesight import context
from pipesight._torch.autograd import in_backward, in_checkpoint, innermost_saved_tensor_hooks

__all__ = ["CallerState", "began_in_backward"]

R = TypeVar("R")

_CPU = torch.device("cpu")

_around: contextvars.ContextVar[frozenset[Hashable]] = contextvars.ContextVar("pipelines around", default=frozenset())
_in_backward: contextvars.ContextVar[bool] = contextvars.ContextVar("pipelines in backward", default=False)


def began_in_backward() -> bool:
    """Return, in a layer, whether a backward called the pipeline, or one around it, to recompute it."""
    return _in_backward.get()


class CallerState:
    """The state of the calling thread: context variables, autocast, inference mode, default device, hooks.

    The grad mode is not among them: a checkpointed forward has its own. Neither are Python's dispatch and function
    modes, which are not made for several threads, nor the saved-tensor hooks of ``torch.utils.checkpoint``: they count
    what one thread saves, and to get it back they would call the pipeline from its own worker.

    Args:
        pipeline: What the caller calls.
        caches_casts: Let autocast keep its casts of the weights. Threads share them, so it must not where several
            threads use one weight.

    Attributes:
        in_checkpoint: Whether ``torch.utils.checkpoint`` decides what is kept for backward.
        in_backward: Whether the caller is itself called by a backward.
    """

    def __init__(self, pipeline: Hashable, *, caches_casts: bool = True) -> None:
        self._pipeline = pipeline
        self.refuse_inside()
        self._context = contextvars.copy_context()
        self._context.run(_around.set, _around.get() | {pipeline})
        self.in_backward = in_backward()
        if self.in_backward:
            self._context.run(_in_backward.set, True)
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]
        self._autocast_cache = caches_casts and torch.is_autocast_cache_enabled()
        self._device = torch.empty(0).device  # before torch 2.8, get_default_device() sees no `with torch.device(...)`
        self._hooks = innermost_saved_tensor_hooks()
        self.in_checkpoint = in_checkpoint(self._hooks)
        if self.in_checkpoint:
            self._hooks = None
        self._plain = not (self._inference or self._autocast or self._hooks) and self._device == _CPU

    def refuse_inside(self) -> None:
        """Raise if the caller is a layer of the pipeline, whose worker would wait for itself."""
        if self._pipeline in _around.get():
            where = context.current()
            raise RuntimeError(
                "a pipeline cannot be called from one of its own layers"
                if where is None or where.phase != "backward"
                else "a pipeline cannot be called from the backward of one of its own layers, for example by "
                "saved-tensor hooks that recompute it; use torch.utils.checkpoint instead"
            )

    def run(self, function: Callable[..., R], *args: Any) -> R:
        """Call ``function`` under the caller's state, whatever other tasks changed.

        Each task enters it anew. Autocast caches its casts of the weights until it ends, and one that a checkpointed
        task made without grad must not serve the next task.
        """
        around = self._context.copy()
        return around.run(function, *args) if self._plain else around.run(self._entered, function, *args)

    def _entered(self, function: Callable[..., R], *args: Any) -> R:
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            if self._device != _CPU:
                stack.enter_context(self._device)
            if self._hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self._hooks))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._autocast_cache))
            return function(*args)
