"""Packets of tensors on their way from one partition to another: mailboxes between threads, streams between GPUs.

Mailbox ``(i, j)`` is between partitions j - 1 and j, ``(i, key)`` between the two ends of a skip. In forward, a task
waits at ``(i, j)`` for its input and puts its output into ``(i, j + 1)``. In backward, it waits at ``(i, j + 1)`` for
the gradients of its output and puts those of its input into ``(i, j)``.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pipesight.pipeline.microbatch import Form, lone

__all__ = ["AbortedError", "Mailboxes", "Packet", "Streams", "ready", "receive"]


@dataclass(slots=True)
class Packet:
    """Tensors, or their gradients, sent by one partition to another."""

    tensors: list[Tensor | None]
    device: torch.device  # of the sender
    needed: list[bool] = field(default_factory=list)  # which of them want a gradient
    form: Form = lone  # makes of them what a layer takes
    ready: torch.cuda.Event | None = None
    graph: Any = None  # they are part of this graph, which the next partition extends


class AbortedError(Exception):
    """The pass ends early: another worker failed, or the caller gave up."""


class Mailboxes:
    """The mailboxes of one pass.

    A packet wakes up the worker that waits for it. While the workers take turns (`take_turns`), each holds back what
    it sends until it has to wait itself, so that one runs at a time.
    """

    _PATIENCE = 0.05  # seconds

    def __init__(self, boxes: Iterable[Hashable], partitions: int) -> None:
        self._boxes: dict[Hashable, SimpleQueue[Packet | None]] = {box: SimpleQueue() for box in boxes}
        self._held: list[collections.deque[tuple[Hashable, Packet]]] = [collections.deque() for _ in range(partitions)]
        self._hold_until = 0.0
        self._aborted = False

    def add(self, boxes: Iterable[Hashable]) -> None:
        """Add mailboxes, before the pass begins."""
        self._boxes.update((box, SimpleQueue()) for box in boxes)

    def take_turns(self, until: float) -> None:
        """Hold packets back until this time of ``time.perf_counter``."""
        self._hold_until = until

    def put(self, box: Hashable, packet: Packet, j: int) -> None:
        """Leave a packet of partition j in a mailbox."""
        if self._hold_until and time.perf_counter() < self._hold_until:
            self._held[j].append((box, packet))
        else:
            self.release(j)
            self._boxes[box].put(packet)

    def get(self, box: Hashable, j: int) -> Packet:
        """Wait, in partition j, for the packet in a mailbox."""
        queue = self._boxes[box]
        if self._held[j] and queue.empty():
            self.release(j)
        while True:
            try:
                packet = queue.get(timeout=self._PATIENCE if self._hold_until else None)
                break
            except Empty:  # a layer that has been quick so far no longer is
                for other in range(len(self._held)):
                    self.release(other)
        if packet is None or self._aborted:
            self._aborted = True
            raise AbortedError
        return packet

    def check(self) -> None:
        """Raise if the pass ends early."""
        if self._aborted:
            raise AbortedError

    def release(self, j: int) -> None:
        """Deliver the packets that partition j holds back."""
        held = self._held[j]
        while held:
            try:
                box, packet = held.popleft()
            except IndexError:  # another worker was faster
                return
            self._boxes[box].put(packet)

    def abort(self) -> None:
        """Make every worker stop before its next task."""
        # In a single C call, so that an interrupt cannot leave some of them waiting.
        collections.deque(map(SimpleQueue.put, self._boxes.values(), itertools.repeat(None)), maxlen=0)
        self._aborted = True


class Streams:
    """The CUDA streams of one mini-batch: the caller's for computing, and one per micro-batch for copies.

    Partitions compute on the streams that were the caller's current ones at forward; backward stays on them, as
    autograd's does. ``None`` stands for a partition on the CPU. Copies run beside the computation.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.compute = [torch.cuda.current_stream(d) if d.type == "cuda" else None for d in devices]
        self._copies: dict[tuple[torch.device, int], torch.cuda.Stream] = {}

    def copying(self, device: torch.device, i: int) -> torch.cuda.Stream:
        """Return the stream for the copies of micro-batch i from or to ``device``."""
        key = (device, i)
        if key not in self._copies:
            self._copies[key] = torch.cuda.Stream(device)
        return self._copies[key]

    def follow_caller(self) -> None:
        """Make a pass wait for what the caller has enqueued."""
        for stream in set(self.compute):
            if stream is not None and stream != (current := torch.cuda.current_stream(stream.device)):
                stream.wait_stream(current)

    def lead_caller(self) -> None:
        """Make what the caller enqueues from now on wait for the pass."""
        for stream in set(self.compute):
            if stream is not None and stream != (current := torch.cuda.current_stream(stream.device)):
                current.wait_stream(stream)


def ready(source: torch.device, target: torch.device, *, always: bool = False) -> torch.cuda.Event | None:
    """Return an event for what this thread has enqueued on ``source``, if ``target`` has to wait for it."""
    if (source == target and not always) or source.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(source).record_event()
    return event


def receive(packet: Packet, target: torch.device, streams: Streams, j: int, i: int) -> list[Tensor | None]:
    """Return the tensors of a packet on ``target``, in the order of what partition j enqueues there.

    Tensors that were not on the packet's device, such as lengths on the CPU, stay where they are.
    """
    compute = streams.compute[j]
    if packet.device == target:
        if packet.ready is not None and compute is not None:
            compute.wait_event(packet.ready)
        return packet.tensors
    if packet.graph is not None:  # autograd has to see the copy
        if packet.ready is not None:
            torch.cuda.current_stream(packet.device).wait_event(packet.ready)
        return [t if t is None or t.device != packet.device else t.to(target) for t in packet.tensors]
    stream = streams.copying(packet.device if packet.device.type == "cuda" else target, i)
    if packet.ready is not None:
        stream.wait_event(packet.ready)
    moved: list[Tensor | None] = []
    for tensor in packet.tensors:
        if tensor is None or tensor.device != packet.device:
            moved.append(tensor)
            continue
        with torch.cuda.stream(stream):
            # A copy to the CPU has to be waited for, here in the thread that needs it.
            copy = tensor.to(target, non_blocking=target.type == "cuda")
        if tensor.is_cuda:
            tensor.record_stream(stream)
        if copy.is_cuda and compute is not None:
            copy.record_stream(compute)
        moved.append(copy)
    if compute is not None:
        compute.wait_stream(stream)
    return moved
