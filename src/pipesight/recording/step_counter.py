"""Which training step this is: found from the optimizers' steps, unless the program says.

A step ends with an optimizer's step. The next begins with whatever comes first of what belongs to it: a batch is
fetched, a model called, a backward begun, something sent or received. So two optimizers that step one after the other
end one step, several mini-batches before an optimizer's step are of one step, and an evaluation is of the step that it
precedes::

    fetch  forward  backward  step  |  fetch  evaluate  forward  backward  forward  backward  step  step  |  fetch ...
    0      0        0         0     |  1      1         1        1         1        1         1     1     |  2
"""

from __future__ import annotations

import functools
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
from pipesight._torch.distributed import optimizer_rehearsal_code
from pipesight._torch.loading import iterator_class
from pipesight.recording.pipeline_description import Pipeline
from pipesight.trace.automatic import on_outermost

__all__ = ["StepCounter", "StepListener"]


class StepListener(Protocol):
    """Is told how a run goes on. What it raises reaches the training: it must not."""

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
    """Counts the steps of this process.

    Args:
        first: The number of the first.
        follower: Who is told.
    """

    def __init__(self, first: int, follower: StepListener) -> None:
        self._number = first
        self._follower = follower
        self._ended = False  # an optimizer has stepped, and nothing has begun since
        self._told = False
        self._turning = threading.RLock()
        self._patches = Patches()

    @property
    def number(self) -> int:
        """The step under way."""
        return self._number

    @property
    def ended(self) -> bool:
        """Whether it is over, and the next has not begun."""
        return self._ended

    def attach(self) -> None:
        """Begin to count."""
        self._patches.keep(register_optimizer_step_post_hook(self._optimizer_stepped))
        watch = functools.partial(self._patches.wrap, may_raise=True)  # statistics do, where they are told to
        watch(iterator_class(), "__next__", self._before)
        watch(torch.autograd, "backward", self._before)
        watch(torch.autograd, "grad", self._before)
        watch(torch.amp.GradScaler, "step", self._scaler_stepped)
        if dist.is_available():
            for name in ("send", "recv", "isend", "irecv"):  # ranks that wait for each other turn to a step together
                watch(dist.distributed_c10d, name, self._before)
            watch(dist.distributed_c10d, "init_process_group", self._joining)
            watch(dist.distributed_c10d, "destroy_process_group", self._before_parting)
        on_outermost.append(self._module_called)
        context.count_steps(self)

    def detach(self) -> None:
        """Count no longer."""
        context.count_steps(None)
        if self._module_called in on_outermost:
            on_outermost.remove(self._module_called)
        self._patches.undo()

    def tell(self, number: int) -> None:
        """Begin the step of this number; from now on the program counts."""
        with self._turning:
            self._told, self._ended = True, False
            if number != self._number:
                self._turn_to(number)

    def begin(self) -> None:
        """Take note that something begins which cannot belong to a step that has ended."""
        if self._ended and context.current() is None:
            with self._turning:
                if self._ended:
                    self._ended = False
                    self._turn_to(self._number + 1)

    def called(self, pipeline: Any) -> int:
        """Take note of the call of a pipeline, and return the step that it belongs to."""
        self.begin()
        self._follower.meet_pipeline(pipeline)
        return self._number

    def catch_up(self, number: int) -> None:
        """Take note that other ranks, which work on the same mini-batch, are at this step already."""
        with self._turning:
            if number > self._number:
                self._ended = False
                self._turn_to(number)

    def _turn_to(self, number: int) -> None:
        last, self._number = self._number, number
        self._follower.turn(last, number)

    def _module_called(self, module: nn.Module) -> None:
        self.begin()
        self._follower.meet_module(module)

    def _before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begin()
        return original(*args, **kwargs)

    def _joining(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._follower.join()
        return result

    def _before_parting(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:  # all groups
            self._follower.part()
        return original(*args, **kwargs)

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_rehearsal():
            self._end()

    def _scaler_stepped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count a step that a scaler leaves out too: its gradients overflowed."""
        result = original(*args, **kwargs)
        self._end()
        return result

    def _end(self) -> None:
        if not self._told and not self._ended:
            self._ended = True
            self._follower.stepped()


def _is_rehearsal() -> bool:
    """Return whether an optimizer steps only to get a state, which a checkpoint is then loaded into."""
    code = optimizer_rehearsal_code()
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
