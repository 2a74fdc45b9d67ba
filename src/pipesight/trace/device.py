"""Spans on a GPU: when kernels ran, not when they were launched.

An event of CUDA is put into the stream at either end of a span. Nobody waits for them: when both are done, the writer
asks CUDA how long after a first event, whose time on the host's clock is known, they were. Each device has a track of
its own in the trace.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import Any

from pipesight.trace._span import Args, next_id, now, on_flush, past, thread_ids
from pipesight.trace.node import Node

__all__ = ["DeviceSpan", "DeviceSpans", "device_spans"]

_TRACK = 10_000_000  # numbers of device tracks, beyond those of threads
_MOST_PENDING = 10_000
_ANCHOR_LASTS = 5e9  # nanoseconds: CUDA's float milliseconds are exact to a microsecond for some ten seconds


class DeviceSpan:
    """A span that has begun on a stream."""

    __slots__ = ("begin", "device", "end", "id", "node")

    def __init__(self, node: Node, device: int, begin: Any) -> None:
        self.node, self.device, self.begin = node, device, begin
        self.id = next_id()
        self.end: Any = None


class DeviceSpans:
    """Spans of the current streams of threads that work with CUDA; others cost a look at a flag."""

    def __init__(self) -> None:
        self._begin_process()
        on_flush.append(self.resolve)
        os.register_at_fork(after_in_child=self._begin_process)

    def _begin_process(self) -> None:
        self.dropped = 0
        self._spare: deque[Any] = deque()
        self._pending: deque[tuple[DeviceSpan, Args]] = deque()
        self._anchors: dict[int, tuple[Any, int]] = {}
        self._resolving = threading.RLock()  # a signal may end the trace at any point

    def begin(self, node: Node) -> DeviceSpan | None:
        """Begin a span on this thread's current stream, if it has one that can be timed."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        device = torch.cuda.current_device()
        if device not in self._anchors:
            self._anchor(torch, device)
        return DeviceSpan(node, device, self._record(torch))

    def end(self, span: DeviceSpan, args: Args) -> None:
        """End it where the stream is now, and look which earlier ones are done."""
        torch = sys.modules["torch"]
        if torch.cuda.is_current_stream_capturing():
            return
        span.end = self._record(torch)
        self._pending.append((span, args))
        self.resolve()

    def resolve(self, wait: bool = False) -> None:
        """Record the spans that are over. With ``wait``, wait for all."""
        if not self._resolving.acquire(blocking=wait):
            return
        try:
            while self._pending:
                span, args = self._pending[0]
                if not span.end.query():
                    if not wait:
                        break
                    span.end.synchronize()
                self._pending.popleft()
                self._resolve(span, args)
            while len(self._pending) > _MOST_PENDING:
                self._pending.popleft()
                self.dropped += 1
        finally:
            self._resolving.release()

    def _resolve(self, span: DeviceSpan, args: Args) -> None:
        anchor, moment = self._anchors[span.device]
        start = moment + int(anchor.elapsed_time(span.begin) * 1e6)
        stop = start + int(span.begin.elapsed_time(span.end) * 1e6)
        known = {**span.node.args, **args, "device": f"cuda:{span.device}"}
        past(span.node, start, stop, known, number=span.id, thread=_TRACK + span.device)
        if stop - moment > _ANCHOR_LASTS:
            self._anchors[span.device] = (span.end, stop)
            self._spare.append(span.begin)
        else:
            self._spare += (span.begin, span.end)

    def _record(self, torch: Any) -> Any:
        try:
            event = self._spare.popleft()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _anchor(self, torch: Any, device: int) -> None:
        """Learn when, on the host's clock, an event of this device was; the one wait there is."""
        with self._resolving:
            if device in self._anchors:
                return
            tries = []
            for _ in range(5):
                event = torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize(device)
                before = now()
                event.record()
                event.synchronize()
                after = now()
                tries.append((after - before, before + (after - before) // 2, event))
            _, moment, event = min(tries, key=lambda t: t[0])
            thread_ids[_TRACK + device] = (_TRACK + device, f"cuda:{device} {torch.cuda.get_device_name(device)}")
            self._anchors[device] = (event, moment)


device_spans = DeviceSpans()
"""Those of this process."""
