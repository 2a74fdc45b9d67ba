"""One pass over the workers, forward or backward: packets from one to the next, and one failure stops all."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipesight import context
from pipesight.context import Where
from pipesight.pipeline.failure import annotate
from pipesight.pipeline.microbatch import Form, lone
from pipesight.pipeline.randomness import isolated
from pipesight.pipeline.transfer import Streams
from pipesight.pipeline.worker import Workers

__all__ = ["Packet", "Relay"]


@dataclass(slots=True)
class Packet:
    """Tensors, or their gradients, on their way from one partition to another."""

    tensors: list[Tensor | None]
    device: torch.device  # of the partition they come from
    needed: list[bool] = field(default_factory=list)  # which of them want a gradient
    form: Form = lone  # makes of them what a layer takes
    ready: torch.cuda.Event | None = None
    graph: Any = None  # they are part of this graph, which the next partition goes on with


Tasks: TypeAlias = Callable[[Sequence[int], Where], None]
"""All that a worker does in one pass, given its partitions."""


class Relay:
    """The state that the workers share during one pass."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        streams: Streams,
        boxes: Iterable[Hashable],
    ) -> None:
        self.streams = streams
        self._boxes: dict[Hashable, SimpleQueue[Packet | None]] = {box: SimpleQueue() for box in boxes}
        self._aborted = False
        self._failing = threading.Lock()
        self._failure: BaseException | None = None
        self.observers = context.observers()
        # Workers on the CPU share the caller's intra-op threads; each keeps a count of its own.
        on_cpu = sum(device.type == "cpu" for device in devices)
        self._threads = max(1, torch.get_num_threads() // max(1, on_cpu))

    def put(self, box: Hashable, packet: Packet) -> None:
        """Leave a packet for whoever waits at ``box``."""
        self._boxes[box].put(packet)

    def get(self, box: Hashable) -> Packet:
        """Wait for the packet at ``box``."""
        packet = self._boxes[box].get()
        if packet is None or self._aborted:
            raise _Aborted
        return packet

    def abort(self) -> None:
        """Make every worker end before its next task."""
        # In a single C call, so that an interrupt cannot leave some of them waiting.
        collections.deque(map(SimpleQueue.put, self._boxes.values(), itertools.repeat(None)), maxlen=0)
        self._aborted = True

    def run(self, workers: Workers, tasks: Tasks) -> None:
        """Let each worker run ``tasks`` for its partitions; raise the first exception of any of them."""
        jobs = [functools.partial(self._job, tasks, share) for share in workers.shares]
        self.streams.follow_caller()
        try:
            workers.run(jobs, self.abort)
        finally:
            self.streams.lead_caller()
            if None in self.streams.compute:
                # The last count set anywhere is the default of threads to come.
                torch.set_num_threads(torch.get_num_threads())
            failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame

    def _job(self, tasks: Tasks, partitions: Sequence[int], where: Where) -> None:
        stream = self.streams.compute[partitions[0]]  # the same for all of them
        where.observers = self.observers
        try:
            if stream is None and torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            with isolated(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                tasks(partitions, where)
        except _Aborted:
            pass
        except BaseException as error:
            with self._failing:
                if self._failure is None:
                    self._failure = error
                    annotate(error, where)
            self.abort()
        finally:
            where.phase = None
            where.layer = None
            where.token = None


class _Aborted(Exception):  # noqa: N818 (another worker has the error)
    """The pass ends early: another worker failed, or the caller gave up."""
