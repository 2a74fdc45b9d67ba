"""Record the all-reduces that DDP makes in C++ during a backward, and the time that the backward waits for them.

Autograd says when the last gradient is there, and the future of each all-reduce when it is done::

    backward      |---------------------------|= waits =|
    all-reduces              |--------|--------|--------|       one a bucket

On GPUs nothing is recorded: the host does not wait for them, and a profiler's trace shows them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pipesight import context
from pipesight._patches import Patches, harmless
from pipesight._torch.autograd import current_backward, in_backward
from pipesight._torch.c10d import CAN_BE_SEEN, AroundAllReduces, when_backward_ends
from pipesight.trace import _span_events
from pipesight.trace._span_events import now, past
from pipesight.trace.ai import ai
from pipesight.trace.automatic._step_argument import with_step
from pipesight.trace.automatic.collectives import group_name, is_inside
from pipesight.trace.automatic.modules import end_inner_backwards

__all__ = ["instrument_reductions"]


class _Reduction:
    """An all-reduce under way."""

    __slots__ = ("args", "done")

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args
        self.done: int | None = None

    def ended(self, _: Any) -> None:
        """Take the time. Called in a thread of the process group."""
        self.done = now()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.backward = -1
        self.reductions: list[_Reduction] = []


_here = _PerThread()


def instrument_reductions(patches: Patches) -> None:
    """Record ``comm.all_reduce`` and ``comm.all_reduce.wait`` of DDP."""
    if CAN_BE_SEEN:
        patches.keep(AroundAllReduces(_around))


def _around(original: Callable[[], Any], tensors: Sequence[Tensor], group: Callable[[], Any]) -> None:
    node = ai.comm.all_reduce
    # Calls from Python are recorded there.
    if not node.recording or not in_backward() or is_inside(node) or context.current() is not None:
        original()
        return
    known = {"size": sum(tensor.nbytes for tensor in tensors)}
    span = _span_events.begin(node)
    try:
        work = original()
    finally:
        known = with_step({**node.args, **known, "group": group_name(group())})
        _span_events.end(span, {**known, "async": True})
    _follow(work, known)


@harmless
def _follow(work: Any, known: dict[str, Any]) -> None:
    if _here.backward != current_backward():
        _here.backward, _here.reductions = current_backward(), []
        when_backward_ends(_computed)  # before DDP asks to be called, to wait
    reduction = _Reduction(known)
    _here.reductions.append(reduction)
    work.get_future().add_done_callback(reduction.ended)


@harmless
def _computed() -> None:
    """The last gradient is there."""
    reductions = _here.reductions
    _here.backward, _here.reductions = -1, []
    end_inner_backwards()
    moment = now()  # after these ends: what begins before them would be inside

    @harmless
    def waited() -> None:
        node, since, last = ai.comm.all_reduce.derive("wait"), moment, now()
        for reduction in reductions:
            done = last if reduction.done is None else reduction.done
            past(node, min(since, done), done, reduction.args)
            since = max(since, done)

    when_backward_ends(waited)
