"""Tensors on their way from one partition's device to another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipesight.pipeline.mailbox import Packet

__all__ = ["Streams", "ready", "receive"]


class Streams:
    """The CUDA streams of one mini-batch: the caller's for computing, and others for copies, one a micro-batch.

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
        """Let a pass wait for what the caller has enqueued."""
        for stream in set(self.compute):
            if stream is not None and stream != (current := torch.cuda.current_stream(stream.device)):
                stream.wait_stream(current)

    def lead_caller(self) -> None:
        """Let what the caller enqueues from now on wait for the pass."""
        for stream in set(self.compute):
            if stream is not None and stream != (current := torch.cuda.current_stream(stream.device)):
                current.wait_stream(stream)


def ready(source: torch.device, target: torch.device, *, always: bool = False) -> torch.cuda.Event | None:
    """Return an event for what this thread has enqueued on ``source``, if someone on ``target`` has to wait for it."""
    if source.type != "cuda" or (source == target and not always):
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
