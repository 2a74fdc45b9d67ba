"""Count training steps by the steps of optimizers, unless the program numbers them itself or has none.

A step ends with an optimizer's step; in a program that has no optimizer, with a backward that keeps no graph. The next
begins with whatever comes first: a batch is fetched, a model called, a backward begun, something sent or received. So
two optimizers that step one after the other end one step, several mini-batches before an optimizer's step belong to one
step, and an evaluation belongs to the step after it::

    fetch  forward  backward  step  |  fetch  evaluate  forward  backward  forward  backward  step  step  |  fetch ...
    0      0        0         0     |  1      1         1        1         1        1         1     1     |  2
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipesight import context
from pipesight._patches import Patches
from pipesight._torch.autograd import in_backward
from pipesight._torch.data_loader import iterator_class
from pipesight._torch.optimizer_state import optimizer_rehearsal_code
from pipesight.recording.pipeline_description import Pipeline
from pipesight.trace.automatic import on_outermost

__all__ = ["StepCounter", "StepListener"]


class StepListener(Protocol):
    """What `StepCounter` calls as a run proceeds. It must not raise: errors would reach the training."""

    def turn(self, last: int, step: int) -> None:
        """A step has ended, and another begins."""

    def stepped(self) -> None:
        """An optimizer has stepped, so that the step may be over."""

    def join(self) -> None:
        """The program has joined other ranks."""

    def part(self) -> None:
        """The program is about to leave the other ranks."""

    def meet_pipeline(self, pipeline: Pipeline) -> None:
        """A pipeline is called."""

    def meet_module(self, module: nn.Module) -> None:
        """A module is called, from outside of all others."""


class StepCounter:
    """Counts the steps of this process."""

    def __init__(self, first: int, listener: StepListener) -> None:
        self._number = first
        self._listener = listener
        self._ended = False  # an optimizer has stepped, and nothing has begun since
        self._numbered_by_program = False
        self._has_optimizer: bool | None = None  # None: not looked for
        self._turning = threading.RLock()
        self._patches = Patches()

    @property
    def number(self) -> int:
        """The current step."""
        return self._number

    @property
    def ended(self) -> bool:
        """Whether it has ended, and the next has not begun."""
        return self._ended

    def attach(self) -> None:
        """Start counting."""
        self._patches.keep(register_optimizer_step_post_hook(self._optimizer_stepped))
        watch = functools.partial(self._patches.wrap, may_raise=True)  # statistics do, where the configuration says so
        watch(iterator_class(), "__next__", self._before)
        watch(torch.autograd, "backward", functools.partial(self._backward, 2))
        watch(torch.autograd, "grad", functools.partial(self._backward, 3))
        watch(torch.amp.GradScaler, "step", self._scaler_stepped)
        if dist.is_available():
            for name in (
                "send",
                "recv",
                "isend",
                "irecv",
            ):  # ranks that wait for each other begin a step together
                watch(dist.distributed_c10d, name, self._before)
            watch(dist.distributed_c10d, "init_process_group", self._joining)
            watch(dist.distributed_c10d, "destroy_process_group", self._before_parting)
        on_outermost.append(self._module_called)
        context.count_steps(self)

    def detach(self) -> None:
        """Stop counting."""
        context.count_steps(None)
        if self._module_called in on_outermost:
            on_outermost.remove(self._module_called)
        self._patches.undo()

    def tell(self, number: int) -> None:
        """Begin the step of this number; from now on the program numbers them."""
        with self._turning:
            self._numbered_by_program, self._ended = True, False
            if number != self._number:
                self._turn_to(number)

    def begin(self) -> None:
        """Begin the next step, if the current one has ended: the caller does something that belongs to a new one."""
        if self._ended and context.current() is None:
            with self._turning:
                if self._ended:
                    self._ended = False
                    self._turn_to(self._number + 1)

    def called(self, pipeline: Any) -> int:
        """Return the step that the call of a pipeline belongs to."""
        self.begin()
        self._listener.meet_pipeline(pipeline)
        return self._number

    def catch_up(self, number: int) -> None:
        """Turn to a later step that other ranks have reached with the same mini-batch."""
        with self._turning:
            if number > self._number:
                self._ended = False
                self._turn_to(number)

    def _turn_to(self, number: int) -> None:
        last, self._number = self._number, number
        self._listener.turn(last, number)

    def _module_called(self, module: nn.Module) -> None:
        self.begin()
        self._listener.meet_module(module)

    def _before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begin()
        return original(*args, **kwargs)

    def _backward(self, place: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End the step where no optimizer does: the program changes its parameters itself.

        It does not do so yet if it keeps the graph; ``retain_graph`` and ``create_graph`` are arguments from ``place``.
        """
        self.begin()
        result = original(*args, **kwargs)
        if any(args[place : place + 2]) or kwargs.get("retain_graph") or kwargs.get("create_graph"):
            return result
        if self._has_optimizer is None:
            self._has_optimizer = any(issubclass(type(thing), Optimizer) for thing in gc.get_objects())
        if not self._has_optimizer and context.current() is None and not in_backward():
            self._end()
        return result

    def _joining(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._listener.join()
        return result

    def _before_parting(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:  # all groups
            self._listener.part()
        return original(*args, **kwargs)

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._has_optimizer = True
        if not _only_creates_state():
            self._end()

    def _scaler_stepped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count steps that a scaler skips, too, because gradients overflowed."""
        result = original(*args, **kwargs)
        self._end()
        return result

    def _end(self) -> None:
        if not self._numbered_by_program and not self._ended:
            self._ended = True
            self._listener.stepped()


def _only_creates_state() -> bool:
    """Return whether an optimizer steps only to create its state, which a checkpoint is then loaded into."""
    code = optimizer_rehearsal_code()
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
