"""Record the steps of optimizers, and in them the closure that computes the loss again, which trainers pass."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipesight._patches import Patches, harmless
from pipesight.trace import _span_events
from pipesight.trace._span_events import Span, begin, end
from pipesight.trace.ai import ai
from pipesight.trace.automatic._step_argument import with_step
from pipesight.trace.gpu_spans import DeviceSpan, device_spans

__all__ = ["instrument_optimizers"]


def instrument_optimizers(patches: Patches) -> None:
    """Record ``compute.step`` and ``compute.step.closure``."""
    steps: weakref.WeakKeyDictionary[Optimizer, tuple[Span, DeviceSpan | None]] = weakref.WeakKeyDictionary()
    node = ai.compute.step
    closures = node.derive("closure")

    @harmless
    def started(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if node.recording and not _span_events.is_compiling():
            finish(optimizer)  # if its last step raised
            on_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"][:1])
            steps[optimizer] = (begin(node), device_spans.begin(node) if on_gpu else None)

    @harmless
    def ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _span_events.is_compiling():
            finish(optimizer)

    def finish(optimizer: Optimizer) -> None:
        span, on_device = steps.pop(optimizer, (None, None))
        known = with_step(node.args, optimizer=type(optimizer).__name__)
        if on_device is not None:
            device_spans.end(on_device, known)
        if span is not None:
            end(span, known)

    def called(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        started(optimizer, args, kwargs)
        if optimizer not in steps:
            return None
        # The optimizer comes first, then the closure, in all optimizers of torch.
        if len(args) > 1 and callable(args[1]):
            return (args[0], recorded(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": recorded(kwargs["closure"])}
        return None

    def recorded(closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def call() -> Any:
            with closures(args=with_step({})):
                return closure()

        return call

    patches.keep(register_optimizer_step_pre_hook(called))
    patches.keep(register_optimizer_step_post_hook(ended))
