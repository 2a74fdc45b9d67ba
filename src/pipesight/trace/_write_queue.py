"""A trace file as a sink: a queue of blocks, and the thread that writes them."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

from pipesight._logger import own_logger
from pipesight._plurals import count_of
from pipesight.trace._background import BackgroundThread, wait
from pipesight.trace._encode import NAMING, Encoder
from pipesight.trace._part_files import PartFiles

__all__ = ["TraceFile"]

logger = own_logger(__name__)

_MOST_WAITING = 64 * 2**20  # bytes
_PATIENCE = 10.0  # seconds without progress of the disk, after which nobody waits any longer


class _Last(threading.Event):
    """The last job: write the footer."""


_Job: TypeAlias = tuple[bytes, int] | threading.Event
"""A block and its number of events, or what to set once everything before it is written."""


class TraceFile:
    """A trace on disk, created with the first event; with ``keep_if_empty``, at the latest when it is closed.

    One thread puts blocks in and another writes them. Each has counters of its own, so neither waits for a lock. If the
    disk is too slow, the oldest blocks are dropped; if it fails, those that could not be written; if it does not
    respond at the end, those that are still waiting. The first loss is logged at once, the number of lost events at the
    end. What was written before stays readable.

    A device, such as ``/dev/null``, is written to as it is, by each process.
    """

    def __init__(
        self,
        given: Path,
        *,
        encoder: Encoder,
        child: bool = False,
        compress: bool = True,
        max_bytes: int | None = None,
        max_parts: int | None = None,
    ) -> None:
        self._given, self._compress = given, compress
        self.keep_if_empty = False
        """Whether to leave a file even if there are no events."""
        self._max_bytes, self._max_parts = max_bytes, max_parts
        self._begin(encoder, child)

    def _begin(self, encoder: Encoder, child: bool) -> None:
        self.encoder = encoder
        self.files = PartFiles(
            self._given,
            encoder=encoder,
            child=child,
            compress=self._compress,
            max_bytes=self._max_bytes,
            max_parts=self._max_parts,
            lost=lambda: self.lost,
            warn=self._warn,
        )
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._thread = BackgroundThread("pipesight-trace-file", self._work)
        self._writing = threading.Lock()
        self._closing = False
        self._closed = threading.Event()
        self._events_put = self._bytes_put = self._events_dropped = self._bytes_dropped = 0  # by the thread that puts
        self._events_done = self._bytes_done = 0  # by the thread that writes
        self._given_up = 0  # events, by the thread that closes
        self._warned = False
        self._lost_logged = 0

    def after_fork(self, encoder: Encoder) -> TraceFile:
        """Become the file of a forked process."""
        self.files.release()
        self.keep_if_empty = False
        self._begin(encoder, child=True)
        return self

    @property
    def lost(self) -> int:
        """How many events could not be written."""
        return self._events_dropped + self.files.failed + self._given_up + self.encoder.lost

    # For one thread that puts.

    def put(self, text: bytes, events: int) -> None:
        """Queue lines to be written. Never waits for the disk."""
        if self._closing:  # another thread still records while the process ends
            self._events_dropped += events
            return
        block = self.files.pack(text)
        if events > 1 and not self.files.fits(block):
            lines = text.splitlines(keepends=True)
            for some in (lines[: len(lines) // 2], lines[len(lines) // 2 :]):
                self.put(b"".join(some), sum(not line.startswith(NAMING) for line in some))
            return
        self._bytes_put += len(block)
        self._events_put += events
        self._jobs.put((block, events))
        while self._bytes_waiting() > _MOST_WAITING and self._drop_oldest():
            pass
        self._thread.ensure_running()

    def _bytes_waiting(self) -> int:
        return self._bytes_put - self._bytes_dropped - self._bytes_done

    def _drop_oldest(self) -> bool:
        try:
            job = self._jobs.get_nowait()
        except Empty:
            return False
        if isinstance(job, threading.Event):
            self._jobs.put(job)
            return self._jobs.qsize() > 1
        self._bytes_dropped += len(job[0])
        self._events_dropped += job[1]
        self._warn("the disk is too slow")
        return True

    # For any thread.

    def flush(self) -> None:
        """Wait until everything that was put is written, or the disk does not respond."""
        if not self._closing:
            self._wait(threading.Event())

    def close(self) -> None:
        """Write what is waiting, and the footer; log how many events were lost."""
        if not self._closing:
            self._closing = True
            self._jobs.put(_Last())
        if not self._wait(self._closed):
            self._given_up = self._events_put - self._events_dropped - self._events_done
        self.log_lost()

    def log_lost(self) -> None:
        """Log how many events were lost, if more were than logged so far."""
        if self.lost != self._lost_logged:
            self._lost_logged = self.lost
            logger.warning("lost %s of the trace %s", count_of(self.lost, "event"), self.files.path)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("events of the trace %s are being lost: %s; training continues", self.files.path, why)

    def _wait(self, done: threading.Event) -> bool:
        needed = self._events_put or self.lost or (self.keep_if_empty and done is self._closed)
        if not (self._thread.was_started or needed):
            return True  # there is no file, and none is needed
        if done is not self._closed:
            self._jobs.put(done)

        def is_done(seconds: float) -> bool:
            if not self._thread.ensure_running():
                self._work(until=done)
            return done.wait(seconds)

        if wait(is_done, lambda: (self._events_done, self.files.writes), _PATIENCE):
            return True
        self._warn("the disk does not respond")
        return False

    # For the thread that writes.

    def _work(self, until: threading.Event | None = None) -> None:
        while not self._closed.is_set() and not (until is not None and until.is_set()):
            with self._writing:
                if not self._closed.is_set():
                    self._do(self._jobs.get())

    def _do(self, job: _Job) -> None:
        if isinstance(job, _Last):
            self.files.close(keep_if_empty=self.keep_if_empty)
            self._closed.set()
        elif isinstance(job, threading.Event):
            job.set()
        elif not self._given_up:
            self.files.write(*job)
            self._bytes_done += len(job[0])
            self._events_done += job[1]
