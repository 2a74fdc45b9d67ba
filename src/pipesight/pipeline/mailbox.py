"""One pass over the workers, forward or backward: packets from one to the next, and one failure stops all."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipesight import context
from pipesight.context import Where
from pipesight.pipeline.failure import annotate
from pipesight.pipeline.microbatch import Form, lone
from pipesight.pipeline.randomness import isolated
from pipesight.pipeline.transfer import Streams
from pipesight.pipeline.workers import Pace, Workers

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


Tasks: TypeAlias = Callable[[tuple[int, ...], Where], None]
"""All that a worker does in one pass, given its partitions."""

_PATIENCE = 0.05  # seconds


class Relay:
    """The state that the workers share during one pass.

    A packet for a worker that waits wakes it up. If the `Pace` says that workers take turns, each holds what it sends
    until it has to wait itself, so that one runs at a time.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        streams: Streams,
        boxes: Iterable[Hashable],
        tasks: int,  # of each partition
        pace: Pace,
    ) -> None:
        self.streams = streams
        self._boxes: dict[Hashable, SimpleQueue[Packet | None]] = {box: SimpleQueue() for box in boxes}
        self._tasks, self._pace, self._busiest = tasks, pace, 0.0
        self._held: list[collections.deque[tuple[Hashable, Packet]]] = [collections.deque() for _ in devices]
        self._hold_until = 0.0
        self._aborted = False
        self._failing = threading.Lock()
        self._failure: BaseException | None = None
        self.observers = context.observers()
        # Workers on the CPU share the caller's intra-op threads; each keeps a count of its own.
        on_cpu = sum(device.type == "cpu" for device in devices)
        self._threads = max(1, torch.get_num_threads() // max(1, on_cpu))

    def put(self, box: Hashable, packet: Packet, j: int) -> None:
        """Leave a packet of partition j for whoever waits at ``box``."""
        if self._hold_until and time.perf_counter() < self._hold_until:
            self._held[j].append((box, packet))
        else:
            self._release(j)
            self._boxes[box].put(packet)

    def get(self, box: Hashable, j: int) -> Packet:
        """Wait, in partition j, for the packet at ``box``."""
        queue = self._boxes[box]
        if self._held[j] and queue.empty():
            self._release(j)
        while True:
            try:
                packet = queue.get(timeout=_PATIENCE if self._hold_until else None)
                break
            except Empty:  # a layer that has been quick so far is not now
                for other in range(len(self._held)):
                    self._release(other)
        if packet is None or self._aborted:
            raise _Aborted
        return packet

    def _release(self, j: int) -> None:
        held = self._held[j]
        with contextlib.suppress(IndexError):  # another worker was faster
            while held:
                box, packet = held.popleft()
                self._boxes[box].put(packet)

    def abort(self) -> None:
        """Make every worker end before its next task."""
        # In a single C call, so that an interrupt cannot leave some of them waiting.
        collections.deque(map(SimpleQueue.put, self._boxes.values(), itertools.repeat(None)), maxlen=0)
        self._aborted = True

    def run(self, workers: Workers, tasks: Tasks) -> None:
        """Let each worker run ``tasks`` for its partitions; raise the first exception of any of them."""
        jobs = [functools.partial(self._job, tasks, share) for share in workers.shares]
        self.streams.follow_caller()
        began = time.perf_counter()
        in_turns = self._pace.in_turns and all(stream is None for stream in self.streams.compute)
        if in_turns:
            self._hold_until = began + Pace.BRIEF * self._tasks * len(self._held)
        self.observers.pass_started()
        try:
            workers.run(jobs, self.abort)
        finally:
            self.observers.pass_ended()
            self.streams.lead_caller()
            if None in self.streams.compute:
                # The last count set anywhere is the default of threads to come.
                torch.set_num_threads(torch.get_num_threads())
            failure, self._failure = self._failure, None
        if failure is None:
            average = (time.perf_counter() - began) / (self._tasks * len(self._held))
            self._pace.learn(max(average, self._busiest / self._tasks), in_turns=in_turns)
        else:
            try:
                raise failure
            finally:
                del failure  # it holds this frame

    def _job(self, tasks: Tasks, partitions: tuple[int, ...], where: Where) -> None:
        stream = self.streams.compute[partitions[0]]  # the same for all of them
        where.observers, where.stream = self.observers, stream
        began = time.thread_time()
        try:
            if stream is None and torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            with isolated(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                tasks(partitions, where)
            for j in partitions:
                self._release(j)
            self._busiest = max(self._busiest, time.thread_time() - began)
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
