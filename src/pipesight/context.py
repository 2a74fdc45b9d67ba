"""Where am I: step, partition, micro-batch, phase and layer of the code that is running.

An engine keeps one :class:`Where` per worker thread and changes it in place; everything that observes (log lines,
spans, statistics) reads it. Nothing else carries such state.

    engines --set--> Where <--read-- observers
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

from pipesight._logger import own_logger

__all__ = [
    "Observer",
    "Phase",
    "Where",
    "attach",
    "counted_step",
    "current",
    "current_microbatch",
    "detach",
    "exchanging",
    "is_checkpointing",
    "is_recomputing",
    "observers",
]

Phase = Literal["forward", "recompute", "backward", "weight"]
"""Schedules that split a backward run the gradients of weights by themselves."""

logger = own_logger(__name__)


class Where:
    """The place of one worker thread in the pipe.

    ``phase`` is ``None`` while the worker is idle; the other fields then tell of its last task.
    """

    __slots__ = (
        "checkpoint_stop",
        "checkpointing",
        "device",
        "layer",
        "marks",
        "microbatch",
        "microbatches",
        "observers",
        "partition",
        "partitions",
        "peer",
        "phase",
        "pipe",
        "repeating",
        "samples",
        "serial",
        "step",
        "stream",
        "token",
        "track",
    )

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.stream: torch.cuda.Stream | None = None
        """What the worker computes on; ``None`` on the CPU."""
        self.partition = 0
        self.partitions = 0
        self.step = 0
        self.microbatch = 0
        self.microbatches = 0
        self.phase: Phase | None = None
        self.layer: str | None = None
        self.checkpointing = False
        """The task keeps no activations: they will be recomputed before its backward."""
        self.checkpoint_stop = 0
        """Micro-batches below this number are checkpointed."""
        self.token: MicrobatchToken | None = None
        self.serial = 0
        """A number for each mini-batch of the process."""
        self.pipe = 0
        """A number that all processes have which share a pipeline, and no others; 0 if it is in one."""
        self.samples = 0
        """How many samples the mini-batch has."""
        self.marks: list[tuple[int, str]] = []
        """Where in the task's graph each layer begins, by autograd's sequence number."""
        self.repeating = False
        """A checkpointed forward runs again from its start to the call that interrupted it."""
        self.peer: int | None = None
        """The rank that tensors are being sent to, or received from, between tasks."""
        self.observers = Observers(())
        """Those that see the pass under way."""
        self.track: Any = None
        """What tracing keeps of this worker from one call to the next."""

    def begin_task(
        self,
        phase: Phase,
        partition: int,
        microbatch: int,
        device: torch.device,
        token: MicrobatchToken,
        *,
        checkpointing: bool = False,
        marks: list[tuple[int, str]] | None = None,
    ) -> None:
        """Come to a task, and tell the observers. For engines."""
        self.partition, self.device = partition, device
        self.microbatch, self.token = microbatch, token
        self.checkpointing = checkpointing
        self.layer = None
        self.marks = [] if marks is None else marks
        self.repeating = False
        self.phase = phase
        if self.observers.members:
            self.observers.task_started(self)

    def end_layer(self) -> None:
        """Tell the observers that the backward of a task's last layer has ended: nothing else does."""
        if self.layer is not None and self.observers.members:
            self.observers.layer_ended(self)

    def __repr__(self) -> str:
        return (
            f"Where(step={self.step}, partition={self.partition}, microbatch={self.microbatch}, "
            f"phase={self.phase!r}, layer={self.layer!r})"
        )


class MicrobatchToken:
    """What :func:`current_microbatch` hands out for one micro-batch of one mini-batch."""

    __slots__ = ("_i", "_tensor")

    def __init__(self, i: int) -> None:
        self._i = i
        self._tensor: Tensor | None = None

    @property
    def asked(self) -> bool:
        """Whether a layer has asked for it."""
        return self._tensor is not None

    def tensor(self) -> Tensor:
        """Return the same tensor every time; the tasks of one micro-batch run one after the other."""
        if self._tensor is None:
            import torch  # here, for those who only trace

            self._tensor = torch.tensor(self._i, device="cpu")
        return self._tensor


class Unrepeatable(BaseException):
    """Raised through a layer that is being checkpointed but must not run twice.

    It is no ``Exception``, so that a layer's own ``except Exception`` lets it pass.
    """


class _PerThread(threading.local):
    where: Where | None = None


_here = _PerThread()


def current() -> Where | None:
    """Return the place of the calling thread in the pipe, or ``None`` outside of a partition."""
    where = _here.where
    return None if where is None or where.phase is None else where


def exchanging() -> Where | None:
    """Return the place of the calling thread while it sends to another rank, or receives from one; else ``None``.

    Its ``peer`` is the other rank.
    """
    where = _here.where
    return None if where is None or where.peer is None else where


def enter_thread(where: Where) -> None:
    """Make ``where`` the place of the calling thread. For engines."""
    _here.where = where


def is_checkpointing() -> bool:
    """Tell whether the running forward keeps no activations, because they will be recomputed."""
    where = _here.where
    return where is not None and where.phase == "forward" and where.checkpointing


def is_recomputing() -> bool:
    """Tell whether the running forward is the second one of a checkpointed micro-batch.

    Example::

        def forward(self, x):
            self.samples += 0 if is_recomputing() else len(x)
            return self.layer(x)
    """
    where = _here.where
    return where is not None and where.phase == "recompute"


def current_microbatch() -> Tensor | None:
    """Return a tensor that stands for the running micro-batch, or ``None`` outside of a partition.

    It is one and the same object in every partition, a 0-d tensor that holds the micro-batch's number. Use it as a
    dictionary key or as the target of a weak reference, to hand a tensor to a later partition::

        skips[current_microbatch()] = input       # in one layer
        skip = skips.pop(current_microbatch())    # in a later one

    From the first partition that calls it on, micro-batches are not checkpointed and their backward is not
    pipelined, since a tensor that bypasses the engine can be neither recomputed nor cut out of the graph.
    :mod:`pipesight.skip` has neither cost.
    """
    where = current()
    if where is None or where.token is None:
        return None
    tensor = where.token.tensor()
    if where.repeating:
        where.phase, where.repeating = "forward", False
    if where.checkpointing and where.phase == "forward":
        raise Unrepeatable
    return tensor


class Observer:
    """Is told when tasks and layers start and end. Subclass it, override what you need, and :func:`attach` it.

    The calls come from the worker threads, several at once. ``where`` belongs to the engine and changes after the
    call: copy what you keep. An observer that raises is reported once and detached; training goes on.
    """

    def wanted(self) -> bool:
        """Tell whether the next forward or backward pass is to be observed. Asked once a pass."""
        return True

    def pass_started(self) -> None:
        """A pass starts; told in the thread that called the pipeline, which waits until the pass has ended.

        Over several ranks, that thread runs the tasks of its rank itself, and a pass is forward and backward.
        """

    def pass_ended(self) -> None:
        """It has, or failed."""

    def task_started(self, where: Where) -> None:
        """A partition starts on a micro-batch."""

    def task_ended(self, where: Where) -> None:
        """A partition is done with a micro-batch, or failed."""

    def transfer_started(self, where: Where, source: str, target: str, size: int) -> None:
        """A partition starts to fetch tensors, of ``size`` bytes, from another device. On a GPU, that is queued.

        Or it starts to wait for tensors of another rank.
        """

    def transfer_ended(self, where: Where, source: str, target: str, size: int) -> None:
        """It has them."""

    def layer_started(self, where: Where) -> None:
        """A layer starts; in a backward phase, the backward of that layer."""

    def layer_ended(self, where: Where) -> None:
        """A layer is done. Not called for a layer that raises.

        Layers of a backward are seen if the observer, or any other, saw the forward.
        """


class Observers:
    """The observers of one pass. Each event is a method, which calls it on one observer after the other.

    One that raises is detached. Engines test ``members`` before an event of the hot path: nobody observes, usually.
    """

    def __init__(self, members: tuple[Observer, ...]) -> None:
        self.members = members

    def __bool__(self) -> bool:
        return bool(self.members)

    def pass_started(self) -> None:
        """Call :meth:`Observer.pass_started` of each."""
        for observer in self.members:
            try:
                observer.pass_started()
            except Exception:
                self._drop(observer, "pass_started")

    def pass_ended(self) -> None:
        """Call :meth:`Observer.pass_ended` of each."""
        for observer in self.members:
            try:
                observer.pass_ended()
            except Exception:
                self._drop(observer, "pass_ended")

    def task_started(self, where: Where) -> None:
        """Call :meth:`Observer.task_started` of each."""
        for observer in self.members:
            try:
                observer.task_started(where)
            except Exception:
                self._drop(observer, "task_started")

    def task_ended(self, where: Where) -> None:
        """Call :meth:`Observer.task_ended` of each."""
        for observer in self.members:
            try:
                observer.task_ended(where)
            except Exception:
                self._drop(observer, "task_ended")

    def transfer_started(self, where: Where, source: str, target: str, size: int) -> None:
        """Call :meth:`Observer.transfer_started` of each."""
        for observer in self.members:
            try:
                observer.transfer_started(where, source, target, size)
            except Exception:
                self._drop(observer, "transfer_started")

    def transfer_ended(self, where: Where, source: str, target: str, size: int) -> None:
        """Call :meth:`Observer.transfer_ended` of each."""
        for observer in self.members:
            try:
                observer.transfer_ended(where, source, target, size)
            except Exception:
                self._drop(observer, "transfer_ended")

    def layer_started(self, where: Where) -> None:
        """Call :meth:`Observer.layer_started` of each."""
        for observer in self.members:
            try:
                observer.layer_started(where)
            except Exception:
                self._drop(observer, "layer_started")

    def layer_ended(self, where: Where) -> None:
        """Call :meth:`Observer.layer_ended` of each."""
        for observer in self.members:
            try:
                observer.layer_ended(where)
            except Exception:
                self._drop(observer, "layer_ended")

    def _drop(self, observer: Observer, event: str) -> None:
        self.members = tuple(other for other in self.members if other is not observer)
        _give_up(observer, event)


DEFAULT_OBSERVERS = (("pipesight.logs", "TaskLog"),)
"""What observes every process without anybody asking: :func:`observers` attaches it before the first pass.

By name, because this module stands below those that observe. Everything else is attached by who wants it.
"""

_attached: tuple[Observer, ...] = ()
_attaching = threading.Lock()
_defaults_attached = False


def attach(observer: Observer) -> None:
    """Let ``observer`` see every pass that starts from now on, in every pipeline of this process."""
    global _attached
    with _attaching:
        if observer not in _attached:
            _attached = (*_attached, observer)


def detach(observer: Observer) -> bool:
    """End what :func:`attach` began; tell whether there was anything to end."""
    global _attached
    with _attaching:
        before, _attached = _attached, tuple(o for o in _attached if o is not observer)
        return len(before) > len(_attached)


def _give_up(observer: Observer, event: str) -> None:
    """Detach an observer that raised, and say so once, however many threads it raised in."""
    if detach(observer):
        logger.exception("observer %r failed in %s and was detached; training goes on", observer, event)


def _attach_defaults() -> None:
    global _attached, _defaults_attached
    defaults: list[Observer] = [getattr(importlib.import_module(module), name)() for module, name in DEFAULT_OBSERVERS]
    with _attaching:
        if not _defaults_attached:
            _attached, _defaults_attached = (*defaults, *_attached), True


def observers() -> Observers:
    """Return the attached observers that want to see the next pass. For engines."""
    if not _defaults_attached:
        _attach_defaults()
    wanted = []
    for observer in _attached:
        try:
            if observer.wanted():
                wanted.append(observer)
        except Exception:
            _give_up(observer, "wanted")
    return Observers(tuple(wanted))


class StepCounter(Protocol):
    """Knows which training step the process is at, by its optimizers' steps for example."""

    @property
    def number(self) -> int:
        """The step under way."""

    def called(self, pipeline: Any) -> int:
        """Take note of the call of a pipeline, and return the step that it belongs to."""

    def catch_up(self, number: int) -> None:
        """Take note that other ranks, which work on the same mini-batch, are at this step already."""


_counter: StepCounter | None = None


def count_steps(counter: StepCounter | None) -> None:
    """Let ``counter`` say which step everything belongs to; ``None`` for none: then pipelines count their calls."""
    global _counter
    _counter = counter


def step_counter() -> StepCounter | None:
    """Return who counts steps."""
    return _counter


def counted_step() -> int | None:
    """Return the step under way, if somebody counts steps."""
    counter = _counter
    return None if counter is None else counter.number


def step_of_call(pipeline: Any, own: int) -> int:
    """Return the step that a call of a pipeline belongs to; ``own`` if nobody counts steps. For engines."""
    counter = _counter
    if counter is not None:
        try:
            return counter.called(pipeline)
        except Exception:
            _lose_count()
    return own


def catch_up(step: int) -> None:
    """Go on to a step that other ranks are at, if somebody counts steps: a rank may have nothing to optimize."""
    counter = _counter
    if counter is not None:
        try:
            counter.catch_up(step)
        except Exception:
            _lose_count()


def _lose_count() -> None:
    count_steps(None)
    logger.exception("steps cannot be counted any more, so pipelines count their calls; training goes on")


def __dir__() -> list[str]:
    return __all__
