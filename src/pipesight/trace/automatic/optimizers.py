"""Record the steps of optimizers."""

from __future__ import annotations

import weakref
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
    """Record ``compute.step``."""
    steps: weakref.WeakKeyDictionary[Optimizer, tuple[Span, DeviceSpan | None]] = weakref.WeakKeyDictionary()
    node = ai.compute.step

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

    patches.keep(register_optimizer_step_pre_hook(started))
    patches.keep(register_optimizer_step_post_hook(ended))
