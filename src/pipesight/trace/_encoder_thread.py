"""The thread that takes events out of `EVENTS` and hands their lines to the sinks.

    code that records --> EVENTS --> this thread: lines --> TraceFile's thread: disk

No other thread makes lines. Others request it and wait, so an exception in one of them (Ctrl-C), or a signal handler
that interrupts one of them and ends the process, leaves no event half written and no lock held. They wait as long as
this thread makes progress. If it does not, what is left is counted as lost: an event that has ended is either on disk
or in that count.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from pipesight._logger import own_logger
from pipesight.trace import _span_events
from pipesight.trace._background import BackgroundThread, wait
from pipesight.trace._encode import THREAD, Encoder
from pipesight.trace._span_events import EVENTS, FIELDS, NO_ARGS, thread_ids

__all__ = ["EncoderThread", "Sink"]

logger = own_logger(__name__)

_BATCH = 10_000 * FIELDS
_BACKLOG = 200_000 * FIELDS  # from here on, code that records waits for this thread
_MOST_BACKLOG = 2 * _BACKLOG
_PATIENCE = 3.0  # seconds without progress, after which code that records stops waiting
_LAST_PATIENCE = 10.0  # the same at the end of a trace


class Sink(Protocol):
    """Takes the lines of a trace."""

    def put(self, text: bytes, events: int) -> None:
        """Take some lines. Must not wait."""

    def flush(self) -> None:
        """Write them."""

    def close(self) -> None:
        """Write them; there will be no more. May be called again, even while a call is running."""

    def log_lost(self) -> None:
        """Log how many events were lost."""

    def after_fork(self, encoder: Encoder) -> Sink | None:
        """Return the sink of a forked process."""


class EncoderThread:
    """Hands events to ``sinks`` every ``interval`` seconds, and on request."""

    def __init__(self, interval: float = 0.5) -> None:
        self.interval = interval
        self.sinks: tuple[Sink, ...] = ()
        # A signal handler that ends the process may interrupt whoever holds one of these: both are reentrant.
        self._draining = threading.RLock()
        self._taking = threading.RLock()
        self._announced: dict[int, tuple[int, str]] = {}
        self._in_hand: list[list[Any]] = []  # the batch that is being made into lines
        self._batches = 0  # handed to the sinks
        self._stuck_at = -1  # `_batches` when somebody last waited in vain
        self._warned = False
        self._renew_thread()

    def _renew_thread(self) -> None:
        """Leave the thread that there is: once its requests are no longer ours, it hands out nothing and ends."""
        self._requests: SimpleQueue[threading.Event] = SimpleQueue()
        self._thread = BackgroundThread("pipesight-trace", functools.partial(self._run, self._requests))

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of the current trace, or of the last one."""
        return Encoder()

    def begin(self, encoder: Encoder) -> None:
        """Begin a trace."""
        EVENTS.clear()
        self._warned = False
        self.encoder = encoder

    # For any thread.

    def drain(self, patience: float | None = None) -> bool:
        """Wait until the sinks have all events; return false if there is no progress. Does not wait for the disk."""
        if not self.sinks or not (self._thread.was_started or EVENTS):
            return True
        done = threading.Event()

        def is_done(seconds: float) -> bool:
            if self._thread.is_current or not self.ensure_running():
                self._drain(self._requests)
                return True
            return done.wait(seconds)

        self._requests.put(done)
        return wait(is_done, lambda: self._batches, _LAST_PATIENCE if patience is None else patience)

    def drain_or_give_up(self) -> None:
        """Wait until the sinks have all events; if this thread is stuck, count what is left as lost."""
        if self.drain():
            return
        self._renew_thread()
        with self._taking:
            self._lose([*(self._in_hand.pop() if self._in_hand else ()), *EVENTS])
            EVENTS.clear()
        if sys.__stderr__ is not None:  # not by logging, which may be where it is stuck
            text = f"{self.encoder.lost:,} events of the trace were lost: the thread that writes them is stuck"
            print(f"pipesight: {text}", file=sys.__stderr__, flush=True)

    def limit_backlog(self) -> None:
        """Wait for this thread if it is far behind; if it is stuck, drop the oldest events: memory stays bounded."""
        while len(EVENTS) > _BACKLOG:
            before = self._batches
            if before != self._stuck_at and not self._thread.is_current:
                self.drain(_PATIENCE)
            if self._batches != before:
                continue  # it is only slow
            self._stuck_at = before  # perhaps in a handler of logging; nobody waits again until there is progress
            with self._taking:
                if len(EVENTS) > _MOST_BACKLOG:
                    oldest = EVENTS[: len(EVENTS) - _BACKLOG]
                    EVENTS[: len(oldest)] = self._lose(oldest)
            return

    def count_lost(self, count: int) -> None:
        """Count events that never reached `EVENTS`."""
        self.encoder.lost += count

    def announce_thread(self) -> None:
        """Put the calling thread's name among the events: Python may have given its number to another before."""
        ident = threading.get_ident()
        known = thread_ids[ident]
        if self._announced.get(ident) != known:
            self._announced[ident] = known
            moment = _span_events.now()
            EVENTS.extend((THREAD, *known, moment, moment, 0, ident, NO_ARGS))

    def ensure_running(self) -> bool:
        """Start the thread, if there is a sink; return false if that is impossible."""
        return not self.sinks or self._thread.ensure_running()

    def stop(self) -> None:
        """End the thread."""
        requests, thread = self._requests, self._thread
        self._renew_thread()
        requests.put(threading.Event())
        thread.join(_PATIENCE)

    # The thread itself.

    def _run(self, requests: SimpleQueue[threading.Event]) -> None:
        while self._requests is requests:
            request = None
            with contextlib.suppress(Empty):
                request = requests.get(timeout=self.interval)
            if self._requests is requests:
                _span_events.prepare_flush(last=False)
                self._drain(requests)
            if request is not None:
                request.set()

    def _drain(self, requests: SimpleQueue[threading.Event]) -> None:
        """Hand out the events that exist now, unless somebody gives up on this thread meanwhile."""
        with self._draining:
            if self._in_hand:  # this is a signal handler that interrupted the code below
                self._hand_out(self._in_hand[0])
            left = len(EVENTS)
            while left > 0 and self._requests is requests:
                with self._taking:
                    batch = EVENTS[: min(left, _BATCH)]
                    del EVENTS[: len(batch)]
                    self._in_hand.append(batch)
                left -= max(len(batch), 1)
                self._hand_out(batch)
                self._batches += 1

    def _hand_out(self, batch: list[Any]) -> None:
        sinks = self.sinks
        blocks = list(self._lines(batch))
        with self._taking:
            if not self._in_hand:  # somebody has given up on it, and counted it as lost
                return
            self._in_hand.pop()
        try:
            for text, events in blocks:
                for sink in sinks:
                    sink.put(text, events)
        except Exception:  # a bug: training continues
            self._lose(batch)
            self._warn("some events")

    def _lines(self, batch: list[Any]) -> Iterator[tuple[bytes, int]]:
        """Make lines of a batch; events that cannot be encoded are lost alone."""
        try:
            yield self.encoder.lines(batch)
        except Exception:
            if len(batch) > FIELDS:
                half = len(batch) // FIELDS // 2 * FIELDS
                yield from self._lines(batch[:half])
                yield from self._lines(batch[half:])
            else:
                self._lose(batch)
                self._warn(f"an event of {batch[0]!r}")

    def _lose(self, events: list[Any]) -> list[Any]:
        """Count events as lost; return the announcements of threads among them, which later events need."""
        starts = range(0, len(events), FIELDS)
        kept = [field for k in starts if events[k] is THREAD for field in events[k : k + FIELDS]]
        self.encoder.lost += (len(events) - len(kept)) // FIELDS
        return kept

    def _warn(self, about: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s cannot be written to the trace and will be missing", about, exc_info=True)
