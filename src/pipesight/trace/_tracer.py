"""The one tracer of a process: empties `EVENTS` into sinks, in a thread of its own, and sees to it at every end.

    code that records --> EVENTS --> this thread: lines --> TraceFile's thread: disk

Only that thread makes lines. Others ask it to and wait, so an exception in one of them (Ctrl-C), or a signal handler on
top of it that ends the process, leaves no event half-way and no lock held.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import cached_property
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Protocol

from pipesight._logger import own_logger
from pipesight.trace import _span
from pipesight.trace._encode import THREAD, Encoder
from pipesight.trace._span import EVENTS, FIELDS, NO_ARGS, thread_ids
from pipesight.trace.node import set_recording

__all__ = ["Sink", "Tracer", "tracer"]

logger = own_logger(__name__)

_BATCH = 50_000 * FIELDS
_CROWDED = 200_000 * FIELDS
_OVERCROWDED = 2 * _CROWDED
_PATIENCE = 3.0  # seconds that code which records waits for the thread that drains to get on
_LAST_WAIT = 5.0  # seconds that the end of a process waits for it
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # of which Python would let a process die with nothing done


class Sink(Protocol):
    """Takes the lines of a trace."""

    def put(self, text: bytes, events: int) -> None:
        """Take some lines. Must not wait."""

    def flush(self) -> None:
        """Bring them to where they belong."""

    def close(self) -> None:
        """There will be no more."""

    def after_fork(self, encoder: Encoder) -> Sink | None:
        """Return the sink of a forked process."""


class Tracer:
    """Drains events as long as there is a sink."""

    def __init__(self) -> None:
        self.interval = 0.5
        self._sinks: tuple[Sink, ...] = ()
        self._thread: threading.Thread | None = None
        self._requests: SimpleQueue[threading.Event] = SimpleQueue()
        self._changing = threading.RLock()
        self._met: dict[int, tuple[int, str]] = {}
        self._drained = 0  # batches
        self._complained = False
        self._real_exit: Callable[[int], Any] = os._exit
        self._watching_exit = False
        self.on_finish: list[Callable[[], None]] = []
        """Called when the process ends with a trace being written, after the last event is."""
        self.ending: str | None = None
        """By what it ends, if not by coming to its end."""

    @cached_property
    def encoder(self) -> Encoder:
        """That of the trace which is being written, or was last."""
        return Encoder()

    @property
    def is_writing(self) -> bool:
        """Whether there is a sink."""
        return bool(self._sinks)

    def add(self, sink: Sink, encoder: Encoder | None = None) -> None:
        """Let a sink have all events from now on."""
        with self._changing:
            if self._sinks:
                self.drain()
            else:
                EVENTS.clear()
                self.encoder = encoder or Encoder()
                self._watch_exits()
            self._sinks = (*self._sinks, sink)
            set_recording(True)
            self.ensure_thread()

    def remove(self, sink: Sink) -> None:
        """Give a sink the last events, and close it."""
        with self._changing:
            if sink not in self._sinks:
                return
            if len(self._sinks) == 1:
                set_recording(False)
            _announce(last=True)
            self.drain()
            self._sinks = tuple(other for other in self._sinks if other is not sink)
            if not self._sinks:
                self._unwatch_exits()
                self._end_thread()
        sink.close()

    def pause(self) -> None:
        """Record nothing, unless somebody else wants events too, until `resume`."""
        if len(self._sinks) == 1:
            set_recording(False)

    def resume(self) -> None:
        """Record again."""
        if self._sinks:
            set_recording(True)

    def flush(self) -> None:
        """Write all events that have ended."""
        _announce(last=False)
        self.drain()
        for sink in self._sinks:
            sink.flush()

    def drain(self, patience: float | None = None) -> None:
        """Have all events handed to the sinks. Waits for no disk."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or not thread.is_alive():
            self._drain()
            return
        done = threading.Event()
        self._requests.put(done)
        while not done.wait(0.5 if patience is None else patience):
            if patience is not None:
                return
            if not thread.is_alive():
                self._drain()
                return

    def help_out(self) -> None:
        """Let the thread that drains catch up: memory stays bounded, and nothing is lost as long as it gets on."""
        can_wait = threading.current_thread() is not self._thread
        if can_wait and len(EVENTS) > _CROWDED:
            self.drain(_PATIENCE)
        while (excess := len(EVENTS) - _OVERCROWDED) > 0:
            before = self._drained
            if can_wait:
                self.drain(_PATIENCE)
            if self._drained != before:
                continue  # it is slow: others use the processors
            excess -= excess % -FIELDS  # it is stuck, in someone's logging perhaps
            del EVENTS[:excess]
            self.encoder.lost += excess // FIELDS

    # The thread.

    def ensure_thread(self) -> None:
        """Start the thread that drains, unless it runs."""
        if self._sinks and (self._thread is None or not self._thread.is_alive()):
            thread = threading.Thread(target=self._run, args=(self._requests,), name="pipesight-trace", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                thread.start()
                self._thread = thread

    def _run(self, requests: SimpleQueue[threading.Event]) -> None:
        while self._requests is requests:
            request = None
            with contextlib.suppress(Empty):
                request = requests.get(timeout=self.interval)
            if self._requests is requests:
                _announce(last=False)
                self._drain()
            if request is not None:
                request.set()

    def _end_thread(self) -> None:
        requests, self._requests = self._requests, SimpleQueue()
        requests.put(threading.Event())
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _drain(self) -> None:
        try:
            while EVENTS:
                batch = EVENTS[:_BATCH]
                del EVENTS[:_BATCH]
                self._hand_out(batch)
                self._drained += 1
        except Exception:  # of ours: training goes on
            self._complain("some events")

    def _hand_out(self, batch: list[Any]) -> None:
        try:
            text, events = self.encoder.lines(batch)
        except Exception:
            if len(batch) > FIELDS:
                half = len(batch) // FIELDS // 2 * FIELDS
                self._hand_out(batch[:half])
                self._hand_out(batch[half:])
            else:
                self.encoder.lost += 1
                self._complain(f"an event of {batch[0]!r}")
            return
        for sink in self._sinks:
            sink.put(text, events)

    def _complain(self, about: str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("%s cannot be written to the trace and will be missing there", about, exc_info=True)

    def _meet_thread(self) -> None:
        """Tell the encoder whose number this is, in the stream of events: before, it may have been another's."""
        ident = threading.get_ident()
        known = thread_ids[ident]
        if self._met.get(ident) != known:
            self._met[ident] = known
            moment = _span.now()
            EVENTS.extend((THREAD, *known, moment, moment, 0, ident, NO_ARGS))
        self.ensure_thread()

    # The ends of a process.

    def _watch_exits(self) -> None:
        _span.on_crowd.append(self.help_out)
        _span.on_thread.append(self._meet_thread)
        atexit.register(self.finish)
        if not self._watching_exit:
            self._watching_exit = True
            self._real_exit, os._exit = os._exit, self._flush_and_exit  # type: ignore[assignment]
        if threading.current_thread() is threading.main_thread():
            for number in _ENDINGS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._flush_and_terminate)

    def _unwatch_exits(self) -> None:
        _span.on_crowd.remove(self.help_out)
        _span.on_thread.remove(self._meet_thread)
        atexit.unregister(self.finish)
        if os._exit == self._flush_and_exit:  # nobody put something in front
            os._exit = self._real_exit  # type: ignore[assignment]
            self._watching_exit = False
        if threading.current_thread() is threading.main_thread():
            for number in _ENDINGS:
                if signal.getsignal(number) == self._flush_and_terminate:
                    signal.signal(number, signal.SIG_DFL)

    def finish(self) -> None:
        """Write everything and close the sinks: the process ends."""
        set_recording(False)
        _announce(last=True)
        self.drain(_LAST_WAIT)
        sinks, self._sinks = self._sinks, ()
        for sink in sinks:
            sink.close()
        for tell in list(self.on_finish):
            try:
                tell()
            except Exception:
                logger.exception("something could not be finished")

    def _flush_and_exit(self, status: int) -> None:
        self.ending = f"os._exit({status})"
        try:
            self.finish()
        finally:
            self._real_exit(status)

    def _flush_and_terminate(self, number: int, frame: FrameType | None) -> None:
        self.ending = signal.Signals(number).name
        try:
            self.finish()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def after_fork(self) -> None:
        """Begin anew in a forked process: what was recorded before the fork is the parent's."""
        self._changing, self._requests = threading.RLock(), SimpleQueue()
        self._thread = None
        self._met.clear()
        EVENTS.clear()
        _span.begin_process()
        if self._sinks:
            encoder = self.encoder
            self.encoder = Encoder(include_args=encoder.include_args, offset=encoder.offset)
            children = [sink.after_fork(self.encoder) for sink in self._sinks]
            self._sinks = tuple(child for child in children if child is not None)
            if not self._sinks:
                set_recording(False)
                self._unwatch_exits()


def _announce(*, last: bool) -> None:
    for prepare in _span.on_flush:
        try:
            prepare(last)
        except Exception:
            logger.exception("some events of a device are missing from the trace")


tracer = Tracer()
os.register_at_fork(after_in_child=tracer.after_fork)
