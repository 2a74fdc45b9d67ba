"""Spans on a GPU: when kernels ran, not when they were launched.

A CUDA event is recorded in the stream at either end of a span. Nothing waits for them: once the GPU has passed them,
the encoder thread asks CUDA for their distance from an anchor, an event whose time on the host's clock is known. Each
device has its own track in the trace. If a GPU is too far behind, spans are dropped and counted as lost.

Where one layer of a task ends, the next begins, so they share an event::

    task      |-----------------------|
    layers    |---- a ---|---- b -----|
    events    0          1            2

A backward has one more at its end, since gradients are summed after its last layer.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipesight.trace._span_events import EVENTS, ROOT_ID, Args, lose, next_id, now, on_flush, past, thread_ids
from pipesight.trace.node import Node

__all__ = ["DeviceSpan", "DeviceSpans", "DeviceTask", "device_spans", "is_capturing"]

_TRACK = 10_000_000  # the number of the first device's track, beyond those of threads
_MOST_PENDING = 10_000
_BACKLOG = 4_000  # from so many spans on, code that records resolves them too
_ANCHOR_LASTS = 5e9  # nanoseconds: CUDA's float milliseconds are exact to a microsecond for some ten seconds

_Where: TypeAlias = tuple[int, int, int, int, str | None, int, int]
"""The last entries of `_span_events.Place`."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event of a device, and its time on the host's clock, in nanoseconds."""

    device: int
    event: Any
    moment: int


class DeviceSpan:
    """A span that has begun on a stream."""

    __slots__ = ("anchor", "args", "begin", "end", "id", "node")

    def __init__(self, node: Node, anchor: Anchor, begin: Any) -> None:
        self.node, self.anchor, self.begin = node, anchor, begin
        self.id = next_id()
        self.end: Any = None
        self.args: Args = {}


class DeviceTask:
    """A task of a pipeline on a stream, and its layers."""

    __slots__ = ("_between", "_spare", "_stream", "anchor", "events", "layers", "node", "place")

    def __init__(self, anchor: Anchor, stream: Any, spare: deque[Any]) -> None:
        self.anchor, self._stream, self._spare = anchor, stream, spare
        self.events: list[Any] = []
        self.layers: list[tuple[Node, _Where, int]] = []
        """Node, place, and the index of the event at which the layer begins; it ends at the next."""
        self.node: Node | None = None
        self.place: _Where | None = None
        self._between = False  # whether nothing was launched since the last event
        self.mark()

    def mark(self) -> None:
        """Put an event into the stream, unless nothing was launched since the last one."""
        if self._between:
            return
        try:
            event = self._spare.popleft()
        except IndexError:
            event = sys.modules["torch"].cuda.Event(enable_timing=True)
        event.record(self._stream)
        self.events.append(event)
        self._between = True

    def begin_layer(self) -> None:
        """Mark the begin of a layer."""
        self.mark()
        self._between = False

    def end_layer(self, node: Node, where: _Where) -> None:
        """Mark its end."""
        self.mark()
        self.layers.append((node, where, len(self.events) - 2))

    def end(self, node: Node, where: _Where, *, more: bool) -> None:
        """Mark the end of the task; ``more`` says that something was launched after its last layer."""
        self._between = self._between and not more
        self.mark()
        self.node, self.place = node, where


class DeviceSpans:
    """Spans on CUDA streams. Where CUDA is not used, they cost one check."""

    def __init__(self) -> None:
        self._begin_process()
        on_flush.append(self._flush)
        os.register_at_fork(after_in_child=self._begin_process)

    def _begin_process(self) -> None:
        self._spare: defaultdict[int, deque[Any]] = defaultdict(deque)  # by device, to which an event is bound
        self._pending: deque[DeviceSpan | DeviceTask] = deque()
        self._anchors: dict[int, Anchor] = {}
        self._streams: dict[int, Any] = {}
        self._resolving = threading.RLock()  # reentrant, since a signal handler may end the trace at any point
        self._captures = 0
        self._carried: dict[tuple[Node, int], tuple[Args, Args]] = {}

    @property
    def spare(self) -> int:
        """How many events can be reused."""
        return sum(map(len, self._spare.values()))

    def capturing(self, begins: bool) -> None:
        """Call no CUDA functions while a graph is captured: a call in another thread would break the capture."""
        with self._resolving:
            self._captures += 1 if begins else -1

    def begin(self, node: Node) -> DeviceSpan | None:
        """Begin a span on this thread's current stream; ``None`` without CUDA, or while a graph is captured."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or is_capturing():
            return None
        device = torch.cuda.current_device()
        anchor = self._anchors.get(device) or self._anchor(torch, device)
        return DeviceSpan(node, anchor, self._record(torch, device))

    def end(self, span: DeviceSpan, args: Args) -> None:
        """End a span at the current end of the stream."""
        torch = sys.modules["torch"]
        if is_capturing():
            return
        span.end, span.args = self._record(torch, span.anchor.device), args
        self._put(span)

    def begin_task(self, stream: Any) -> DeviceTask:
        """Begin a task on a stream that is not being captured."""
        device: int = stream.device_index
        anchor = self._anchors.get(device) or self._anchor(sys.modules["torch"], device)
        return DeviceTask(anchor, stream, self._spare[device])

    def end_task(self, task: DeviceTask, node: Node, where: _Where, *, more: bool) -> None:
        """End a task at the current end of its stream."""
        task.end(node, where, more=more)
        self._put(task)

    def _put(self, span: DeviceSpan | DeviceTask) -> None:
        self._pending.append(span)
        if len(self._pending) > _BACKLOG:
            self.resolve()

    def resolve(self, wait: bool = False) -> None:
        """Record the spans that are over. With ``wait``, wait for all."""
        if not self._resolving.acquire(blocking=wait):
            return
        try:
            while self._pending and not self._captures:
                span = self._pending[0]
                last = span.end if isinstance(span, DeviceSpan) else span.events[-1]
                if not last.query():
                    if not wait:
                        break
                    last.synchronize()
                self._pending.popleft()
                if isinstance(span, DeviceSpan):
                    self._resolve(span)
                else:
                    self._resolve_task(span)
            while len(self._pending) > _MOST_PENDING:
                self._drop(self._pending.popleft())
        finally:
            self._resolving.release()

    def _drop(self, span: DeviceSpan | DeviceTask) -> None:
        """Count a span as lost: the GPU is so far behind that more of them would fill the memory."""
        lose(1 if isinstance(span, DeviceSpan) else 1 + len(span.layers))

    def _flush(self, last: bool) -> None:
        """Resolve spans, and renew anchors, before events are written."""
        self.resolve(last)
        if not last:
            self._realign()

    def _resolve(self, span: DeviceSpan) -> None:
        start, stop = self._moments(span.anchor, [span.begin, span.end])
        device = span.anchor.device
        known = {**span.node.args, **span.args, "device": f"cuda:{device}"}
        past(span.node, start, stop, known, number=span.id, thread=_TRACK + device)

    def _resolve_task(self, task: DeviceTask) -> None:
        moments, device = self._moments(task.anchor, task.events), task.anchor.device
        track, number = _TRACK + device, next_id()
        fields: list[Any] = []
        for node, where, at in task.layers:
            place = (self._carry(node, device), 0, *where)
            fields += (node, next_id(), number, moments[at], moments[at + 1], 3, track, place)
        assert task.node is not None
        assert task.place is not None
        place = (self._carry(task.node, device), 0, *task.place)
        fields += (task.node, number, ROOT_ID, moments[0], moments[-1], 2, track, place)
        EVENTS.extend(fields)

    def _carry(self, node: Node, device: int) -> Args:
        """Return the arguments of a node's spans on a device: the same object until the node's arguments change."""
        before, args = self._carried.get((node, device), (None, {}))
        if before is not node.args:
            args = {**node.args, "device": f"cuda:{device}"}
            self._carried[node, device] = (node.args, args)
        return args

    def _moments(self, anchor: Anchor, events: list[Any]) -> list[int]:
        """Return the times of events on the host's clock, and make the events available again."""
        at = anchor.moment + int(anchor.event.elapsed_time(events[0]) * 1e6)
        moments = [at]
        for one, other in itertools.pairwise(events):
            at += int(one.elapsed_time(other) * 1e6)
            moments.append(at)
        self._spare[anchor.device].extend(events)
        return moments

    def _record(self, torch: Any, device: int) -> Any:
        try:
            event = self._spare[device].popleft()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # The clocks.

    def _anchor(self, torch: Any, device: int) -> Anchor:
        """Measure the first anchor of a device. This is the only place that waits for the GPU."""
        with self._resolving:
            if device not in self._anchors:
                torch.cuda.synchronize(device)
                self._anchors[device] = _measure(torch, device, torch.cuda.current_stream(device))
                name = f"cuda:{device} {torch.cuda.get_device_name(device)}"
                thread_ids[_TRACK + device] = (_TRACK + device, name)
            return self._anchors[device]

    def _realign(self) -> None:
        """Measure anchors again, on a stream of our own: clocks drift, and CUDA's float milliseconds lose precision."""
        if not any(now() - anchor.moment > _ANCHOR_LASTS for anchor in self._anchors.values()):
            return
        if not self._resolving.acquire(blocking=False):
            return
        try:
            torch = sys.modules["torch"]
            for device in [] if self._captures else list(self._anchors):
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)
                self._anchors[device] = _measure(torch, device, self._streams[device])
        finally:
            self._resolving.release()


def is_capturing() -> bool:
    """Tell whether this thread's stream is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _measure(torch: Any, device: int, stream: Any) -> Anchor:
    """Take the time before and after an event in an empty stream; the fastest of a few tries is the most accurate."""
    tries = []
    for _ in range(5):
        event = torch.cuda.Event(enable_timing=True)
        before = now()
        event.record(stream)
        event.synchronize()
        after = now()
        tries.append((after - before, before + (after - before) // 2, event))
    _, moment, event = min(tries, key=lambda t: t[0])
    return Anchor(device, event, moment)


device_spans = DeviceSpans()
"""The spans of this process."""
