"""The one tracer of a process: empties `EVENTS` into sinks, in a thread of its own, and sees to it at every end.

    code that records --> EVENTS --> this thread: lines --> TraceFile's thread: disk

Only that thread makes lines. Others ask it to and wait, so an exception in one of them (Ctrl-C), or a signal handler on
top of it that ends the process, leaves no event half-way and no lock held. Whoever waits does so as long as it gets on.
What it leaves behind if it does not is counted as lost: an event that has ended is on disk, or in that count.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from pipesight._logger import own_logger
from pipesight.trace import _span
from pipesight.trace._encode import THREAD, Encoder
from pipesight.trace._exit_hooks import ExitHooks
from pipesight.trace._span import EVENTS, FIELDS, NO_ARGS, thread_ids
from pipesight.trace._waiting import wait
from pipesight.trace.node import set_recording

__all__ = ["Sink", "Tracer", "tracer"]

logger = own_logger(__name__)

_BATCH = 10_000 * FIELDS
_CROWDED = 200_000 * FIELDS
_OVERCROWDED = 2 * _CROWDED
_PATIENCE = 3.0  # seconds without a batch, after which code that records does not wait for the thread that drains
_LAST_PATIENCE = 10.0  # and after which the end of a trace does not


class Sink(Protocol):
    """Takes the lines of a trace."""

    def put(self, text: bytes, events: int) -> None:
        """Take some lines. Must not wait."""

    def flush(self) -> None:
        """Bring them to where they belong."""

    def close(self) -> None:
        """There will be no more. May be called again, while it is being done, too."""

    def say_lost(self) -> None:
        """Say how much was lost."""

    def after_fork(self, encoder: Encoder) -> Sink | None:
        """Return the sink of a forked process."""


class Tracer:
    """Drains events as long as there is a sink."""

    def __init__(self) -> None:
        self.interval = 0.5
        self._sinks: tuple[Sink, ...] = ()
        self._exit_hooks = ExitHooks(self.finish, self._flush_and_say)
        self._begin()
        self.on_finish: list[Callable[[], None]] = []
        """Called when the process ends with a trace being written, after the last event is."""
        self.ending: str | None = None
        """By what it ends, if not by coming to its end."""

    def _begin(self) -> None:
        self._thread: threading.Thread | None = None
        self._requests: SimpleQueue[threading.Event] = SimpleQueue()
        # A signal handler that ends the process may come on top of whoever holds one of these: all are reentrant.
        self._changing = threading.RLock()
        self._finishing = threading.RLock()
        self._starting = threading.RLock()
        self._draining = threading.RLock()
        self._taking = threading.RLock()
        self._met: dict[int, tuple[int, str]] = {}
        self._in_hand: list[list[Any]] = []  # the batch that is being made into lines
        self._drained = 0  # batches
        self._stuck_at = -1  # of them, when somebody waited for the next in vain
        self._complained = False

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
                self._complained = False
                self.encoder = encoder or Encoder()
                _span.on_crowd.append(self.help_out)
                _span.on_lost.append(self._count_lost)
                _span.on_thread.append(self._meet_thread)
                self._exit_hooks.watch()
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
            self._drain_or_give_up()
            self._sinks = tuple(other for other in self._sinks if other is not sink)
            if not self._sinks:
                self._unwatch()
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

    def drain(self, patience: float | None = None) -> bool:
        """Have all events handed to the sinks; return whether they are. Waits for no disk."""
        if not self._sinks or (self._thread is None and not EVENTS):
            return True
        done = threading.Event()

        def is_done(seconds: float) -> bool:
            if threading.current_thread() is self._thread or not self.ensure_thread():
                self._drain(self._requests)
                return True
            return done.wait(seconds)

        self._requests.put(done)
        return wait(is_done, lambda: self._drained, _LAST_PATIENCE if patience is None else patience)

    def _drain_or_give_up(self) -> None:
        """Have all events handed to the sinks, or else count them as lost; the thread that drains is stuck."""
        if self.drain():
            return
        self._requests, self._thread = SimpleQueue(), None  # who has the other one hands out no more
        with self._taking:
            self._lose([*(self._in_hand.pop() if self._in_hand else ()), *EVENTS])
            EVENTS.clear()
        if sys.__stderr__ is not None:  # logging may be where it is stuck
            text = f"{self.encoder.lost:,} events of the trace were lost: the thread that writes them is stuck"
            print(f"pipesight: {text}", file=sys.__stderr__, flush=True)

    def help_out(self) -> None:
        """Let the thread that drains catch up: memory stays bounded, and nothing is lost as long as it gets on."""
        while len(EVENTS) > _CROWDED:
            before = self._drained
            if before != self._stuck_at and threading.current_thread() is not self._thread:
                self.drain(_PATIENCE)
            if self._drained != before:
                continue  # it is slow: others use the processors
            self._stuck_at = before  # in someone's logging perhaps; nobody waits again until it gets on
            with self._taking:
                if len(EVENTS) > _OVERCROWDED:
                    oldest = EVENTS[: len(EVENTS) - _CROWDED]
                    EVENTS[: len(oldest)] = self._lose(oldest)
            return

    def _lose(self, events: list[Any]) -> list[Any]:
        """Count events as lost; return what among them is none, but says which thread has a number from there on."""
        starts = range(0, len(events), FIELDS)
        kept = [field for k in starts if events[k] is THREAD for field in events[k : k + FIELDS]]
        self.encoder.lost += (len(events) - len(kept)) // FIELDS
        return kept

    def _count_lost(self, count: int) -> None:
        self.encoder.lost += count

    # The thread.

    def ensure_thread(self) -> bool:
        """Start the thread that drains, unless it runs, or is being started; return false if it cannot be."""
        if not self._sinks or (self._thread is not None and self._thread.is_alive()):
            return True
        if not self._starting.acquire(blocking=False):
            return True
        try:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, args=(self._requests,), name="pipesight-trace", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:  # the interpreter is shutting down
            return False
        finally:
            self._starting.release()
        return True

    def _run(self, requests: SimpleQueue[threading.Event]) -> None:
        while self._requests is requests:
            request = None
            with contextlib.suppress(Empty):
                request = requests.get(timeout=self.interval)
            if self._requests is requests:
                _announce(last=False)
                self._drain(requests)
            if request is not None:
                request.set()

    def _end_thread(self) -> None:
        requests, self._requests = self._requests, SimpleQueue()
        requests.put(threading.Event())
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _drain(self, requests: SimpleQueue[threading.Event]) -> None:
        """Hand out what there is now, unless somebody gives up on it."""
        with self._draining:
            if self._in_hand:  # this is a signal handler on top of one who drains
                self._hand_out(self._in_hand[0])
            left = len(EVENTS)
            while left > 0 and self._requests is requests:
                with self._taking:
                    batch = EVENTS[: min(left, _BATCH)]
                    del EVENTS[: len(batch)]
                    self._in_hand.append(batch)
                left -= max(len(batch), 1)
                self._hand_out(batch)
                self._drained += 1

    def _hand_out(self, batch: list[Any]) -> None:
        sinks = self._sinks
        blocks = list(self._lines(batch))
        with self._taking:
            if not self._in_hand:  # somebody gave up on it, and has counted it
                return
            self._in_hand.pop()
        try:
            for text, events in blocks:
                for sink in sinks:
                    sink.put(text, events)
        except Exception:  # of ours: training continues
            self._lose(batch)
            self._complain("some events")

    def _lines(self, batch: list[Any]) -> Iterator[tuple[bytes, int]]:
        """Make lines of a batch, without the events that cannot be made into any."""
        try:
            yield self.encoder.lines(batch)
        except Exception:
            if len(batch) > FIELDS:
                half = len(batch) // FIELDS // 2 * FIELDS
                yield from self._lines(batch[:half])
                yield from self._lines(batch[half:])
            else:
                self._lose(batch)
                self._complain(f"an event of {batch[0]!r}")

    def _complain(self, about: str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("%s cannot be written to the trace and will be missing", about, exc_info=True)

    def _meet_thread(self) -> None:
        """Tell the encoder whose number this is, in the stream of events: before, it may have been another's."""
        ident = threading.get_ident()
        known = thread_ids[ident]
        if self._met.get(ident) != known:
            self._met[ident] = known
            moment = _span.now()
            EVENTS.extend((THREAD, *known, moment, moment, 0, ident, NO_ARGS))
        self._exit_hooks.begin_recording()
        self.ensure_thread()

    # The end of the process.

    def finish(self, ending: str | None = None) -> None:
        """Write everything and close the sinks: the process ends."""
        self.ending = ending or self.ending
        with self._finishing:  # another thread may be at it; it ends, as all that it waits for ends
            set_recording(False)
            _announce(last=True)
            self._drain_or_give_up()
            for sink in self._sinks:
                sink.close()
            self._sinks = ()
            for tell in list(self.on_finish):
                try:
                    tell()
                except Exception:
                    logger.exception("an action at the end of the trace failed")

    def _flush_and_say(self) -> None:
        self.flush()
        for sink in self._sinks:
            sink.say_lost()

    def _unwatch(self) -> None:
        _span.on_crowd.remove(self.help_out)
        _span.on_lost.remove(self._count_lost)
        _span.on_thread.remove(self._meet_thread)
        self._exit_hooks.unwatch()

    def before_fork(self) -> None:
        """Get ready for a fork."""
        self._exit_hooks.before_fork()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._exit_hooks.forked()

    def after_fork(self) -> None:
        """Begin anew in a forked process: what was recorded before the fork is the parent's."""
        self._begin()
        self._exit_hooks.begin_process()
        EVENTS.clear()
        _span.begin_process()
        if self._sinks:
            encoder = self.encoder
            self.encoder = Encoder(include_args=encoder.include_args, offset=encoder.offset)
            children = [sink.after_fork(self.encoder) for sink in self._sinks]
            self._sinks = tuple(child for child in children if child is not None)
            if self._sinks:
                self._exit_hooks.after_fork()
            else:
                set_recording(False)
                self._unwatch()
        self._exit_hooks.forked()


def _announce(*, last: bool) -> None:
    for prepare in _span.on_flush:
        try:
            prepare(last)
        except Exception:
            logger.exception("some events of a device are missing from the trace")


tracer = Tracer()
os.register_at_fork(
    before=tracer.before_fork, after_in_parent=tracer.after_fork_in_parent, after_in_child=tracer.after_fork
)
