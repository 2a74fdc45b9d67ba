"""Where am I: the step, partition, micro-batch, phase and layer of the running code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from pipesight.context.observer import Observers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipesight.context.kept import Kept

__all__ = [
    "MicrobatchToken",
    "Phase",
    "Unrepeatable",
    "Where",
    "current",
    "current_microbatch",
    "enter_thread",
    "exchanging",
    "is_checkpointing",
    "is_recomputing",
]

Phase = Literal["forward", "recompute", "backward", "weight"]
"""What a task computes: ``weight`` is the gradients of the weights alone, where a schedule splits the backward."""


class Where:
    """What one worker thread is doing: which partition, micro-batch, phase and layer.

    The engine owns it and changes it in place, so copy what you keep. ``phase`` is ``None`` while the worker is idle;
    the other fields then describe its last task.
    """

    __slots__ = (
        "checkpoint_stop",
        "checkpointing",
        "device",
        "gradients",
        "kept",
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
        "thread",
        "token",
        "track",
    )

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """Where the partition runs."""
        self.stream: torch.cuda.Stream | None = None
        """The CUDA stream of the worker; ``None`` on the CPU."""
        self.partition = 0
        """The partition, from 0."""
        self.partitions = 0
        """How many partitions the pipeline has."""
        self.step = 0
        """The training step, from 0."""
        self.microbatch = 0
        """The micro-batch, from 0."""
        self.microbatches = 0
        """How many micro-batches the mini-batch has."""
        self.phase: Phase | None = None
        """What the task computes; ``None`` between tasks."""
        self.layer: str | None = None
        """The layer under way, by its name in the model."""
        self.checkpointing = False
        """Whether the task discards its activations, to recompute them before its backward."""
        self.checkpoint_stop = 0
        """Micro-batches below this number are checkpointed."""
        self.token: MicrobatchToken | None = None
        """What :func:`current_microbatch` returns for the micro-batch."""
        self.serial = 0
        """The number of the mini-batch in this process."""
        self.pipe = 0
        """An ID shared by the processes of one pipeline; 0 for a pipeline in one process."""
        self.samples = 0
        """How many samples the mini-batch has."""
        self.marks: list[tuple[int, str]] = []
        """The first autograd sequence number of each layer in the task's graph, and the layer."""
        self.repeating = False
        """Whether a checkpointed forward runs again up to the call that interrupted it."""
        self.peer: int | None = None
        """The rank that the worker sends to or receives from, between tasks."""
        self.observers = Observers(())
        """The observers of the current pass."""
        self.kept: Callable[[], Kept] | None = None
        """When a forward or a recomputation ends, or a layer of one: returns what it keeps for its backward."""
        self.gradients: Callable[[], Iterable[Tensor]] | None = None
        """Returns the gradients of weights that the engine holds for the partition, before they are in ``.grad``."""
        self.thread = 0
        """The thread that the tasks are drawn in, if it is not the one that runs them."""
        self.track: Any = None
        """State that tracing keeps for this worker."""

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
        """Start a task, and notify the observers. For engines."""
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
        """Notify the observers that the backward of a task's last layer has ended. For engines."""
        if self.layer is not None and self.observers.members:
            self.observers.layer_ended(self)

    def __repr__(self) -> str:
        return (
            f"Where(step={self.step}, partition={self.partition}, microbatch={self.microbatch}, "
            f"phase={self.phase!r}, layer={self.layer!r})"
        )


class MicrobatchToken:
    """The tensor that identifies one micro-batch of one mini-batch, made when a layer asks for it."""

    __slots__ = ("_i", "_tensor")

    def __init__(self, i: int) -> None:
        self._i = i
        self._tensor: Tensor | None = None

    @property
    def asked(self) -> bool:
        """Whether a layer has called :func:`current_microbatch`."""
        return self._tensor is not None

    def tensor(self) -> Tensor:
        """Return the tensor, the same every time. The tasks of one micro-batch never run at the same time."""
        if self._tensor is None:
            import torch  # here, for those who only trace

            self._tensor = torch.tensor(self._i, device="cpu")
        return self._tensor


class Unrepeatable(BaseException):
    """Raised through a checkpointed layer that cannot be recomputed.

    Not an ``Exception``, so that a layer's own ``except Exception`` lets it pass.
    """


class _PerThread(threading.local):
    where: Where | None = None


_here = _PerThread()


def current() -> Where | None:
    """Return what the calling thread is doing in a pipeline, or ``None`` if it runs no task."""
    where = _here.where
    return None if where is None or where.phase is None else where


def exchanging() -> Where | None:
    """Return the calling thread's place while it exchanges tensors with another rank (``peer``), or ``None``."""
    where = _here.where
    return None if where is None or where.peer is None else where


def enter_thread(where: Where) -> None:
    """Set the place of the calling thread. For engines."""
    _here.where = where


def is_checkpointing() -> bool:
    """Tell whether the running forward discards its activations, to recompute them later."""
    where = _here.where
    return where is not None and where.phase == "forward" and where.checkpointing


def is_recomputing() -> bool:
    """Tell whether the running forward is the recomputation of a checkpointed micro-batch.

    Example::

        def forward(self, x):
            self.samples += 0 if is_recomputing() else len(x)
            return self.layer(x)
    """
    where = _here.where
    return where is not None and where.phase == "recompute"


def current_microbatch() -> Tensor | None:
    """Return a tensor that identifies the running micro-batch, or ``None`` outside a partition.

    All partitions get the same object, a 0-d tensor that holds the micro-batch's number. Use it as a dictionary key or
    the target of a weak reference, to pass a tensor to a later partition::

        skips[current_microbatch()] = input       # in one layer
        skip = skips.pop(current_microbatch())    # in a later one

    From the first partition that calls it on, micro-batches are not checkpointed and their backward is not
    pipelined: a tensor that bypasses the engine can be neither recomputed nor cut out of the graph. Use
    :mod:`pipesight.skip` to avoid both costs.
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
