"""Record losses and the learning rate of each optimizer's step, as counters.

A loss is what a backward begins with, or what a step of a pipeline returns.

A loss on a GPU is copied without waiting for it, and recorded once the copy is there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipesight import context
from pipesight._patches import Patches, harmless
from pipesight._torch.tensors import in_transform, without_function_overrides
from pipesight.trace import _span_events
from pipesight.trace._args import plain_args
from pipesight.trace._recording_switch import is_recording
from pipesight.trace._span_events import Mark, now, on_flush, on_loss, put
from pipesight.trace.gpu_spans import is_capturing

__all__ = ["instrument_curves"]

_LOSS = Mark("C", "loss", "counter")
_RATE = Mark("C", "learning rate", "counter")
_MOST = 1_000
"""How many losses of GPUs are kept until they are there."""

_coming: deque[tuple[Tensor, Any, int]] = deque(maxlen=_MOST)
_unscaled: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # by the ID of the scaled loss
_optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def instrument_curves(patches: Patches) -> None:
    """Record the counters ``loss`` and ``learning rate``."""
    patches.wrap(torch.autograd, "backward", _backward)
    patches.wrap(torch.amp.GradScaler, "scale", _scale)
    patches.keep(register_optimizer_step_post_hook(_stepped))
    patches.keep(_StepLosses())
    if _at_flush not in on_flush:
        on_flush.append(_at_flush)


class _StepLosses:
    """Records losses of steps until it is removed."""

    def __init__(self) -> None:
        on_loss.append(_record_loss)

    def remove(self) -> None:
        """Stop it."""
        on_loss.remove(_record_loss)


def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_recording() and context.current() is None and not (_span_events.is_compiling() or is_capturing()):
        _record_loss(args[0] if args else kwargs.get("tensors"))
    return original(*args, **kwargs)


@harmless
def _record_loss(given: Any) -> None:
    loss = given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given
    _record_those_there()
    # Subclasses may have no value here, or need other ranks to know it.
    if type(loss) is not Tensor or loss.numel() != 1 or not loss.is_floating_point() or in_transform():
        return
    scaled, known = _unscaled.pop(id(loss), (None, loss))
    value = known.detach() if scaled is None or scaled() is loss else loss.detach()
    if value.device.type == "cpu":
        with without_function_overrides():
            put(_LOSS, plain_args({"loss": value.item()}))
    elif value.device.type == "cuda":
        copy = torch.empty((), dtype=value.dtype, pin_memory=True)
        copy.copy_(value.reshape(()), non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(value.device))
        _coming.append((copy, done, now()))


def _record_those_there(wait: bool = False) -> None:
    while _coming and (wait or _coming[0][1].query()):
        copy, done, moment = _coming.popleft()
        if wait:
            done.synchronize()
        put(_LOSS, plain_args({"loss": copy.item()}), moment)


@harmless
def _at_flush(last: bool) -> None:
    _record_those_there(wait=last)


def _scale(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    scaled = original(scaler, outputs)
    if type(outputs) is Tensor and type(scaled) is Tensor and is_recording():
        if len(_unscaled) > _MOST:  # nobody calls backward() on them
            _unscaled.clear()
        _unscaled[id(scaled)] = weakref.ref(scaled), outputs.detach()
    return scaled


@harmless
def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not is_recording() or _span_events.is_compiling() or is_capturing():
        return
    number = _optimizers.setdefault(optimizer, len(_optimizers))
    rates = [group.get("lr") for group in optimizer.param_groups]
    known = [rate.item() if isinstance(rate, Tensor) and rate.device.type == "cpu" else rate for rate in rates]
    if all(isinstance(rate, (int, float)) for rate in known):
        prefix = f"optimizer {number} " if number else ""
        shown = known[:1] if len({*known}) == 1 else known
        names = ["lr"] if len(shown) == 1 else [f"group {k}" for k in range(len(shown))]
        put(_RATE, plain_args({f"{prefix}{name}": rate for name, rate in zip(names, shown, strict=True)}))
