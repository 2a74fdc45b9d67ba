"""The file: complete gzip members, so that it can be read at any moment, whatever ends the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import zlib
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

from pipesight._logger import own_logger
from pipesight.trace._attempt import restarts, with_attempt
from pipesight.trace._encode import NAMING, Encoder, rank

__all__ = ["TraceFile", "name_for"]

logger = own_logger(__name__)

_MOST_WAITING = 64 * 2**20  # bytes
_PATIENCE = 5.0  # seconds without a byte written, after which nobody waits any longer
_FRAME = 1024  # bytes that the frame of a part takes, about
_LEVEL = 4  # the first that finds matches lazily: a seventh smaller than 3, and faster than 6
_MEMORY = 7  # of 9: smaller tables, that stay in cache
_GZIP = 31  # zlib's number for it


def name_for(given: Path, *, child: bool, compress: bool) -> Path:
    """Return the file of this process: the one that was asked for, with rank and process number where others share it.

    >>> name_for(Path("run.pfw"), child=False, compress=True)
    PosixPath('run.pfw.gz')
    """
    name = given.name
    for suffix in (".gz", ".pfw"):
        name = name.removesuffix(suffix)
    if os.environ.get("WORLD_SIZE", "1") != "1" and rank() is not None and not _is_of_rank(name):
        name += f"-rank-{rank():05}"
    name = with_attempt(name, restarts())
    if child:
        name += f"-{os.getpid()}"
    return given.with_name(f"{name}.pfw.gz" if compress else f"{name}.pfw")


def _is_of_rank(name: str) -> bool:
    own = f"rank-{rank():05}"
    return name == own or name.startswith(f"{own}-restart-")


class _Last(threading.Event):
    """Behind the last block: write the end of the frame, and be done."""


_Job: TypeAlias = tuple[bytes, int] | threading.Event
"""A block and its number of events, or someone who waits for all that was put before."""


class TraceFile:
    """A trace on disk. It is made when the first event comes.

    One thread puts blocks in, another writes them; each has counters of its own, and no lock is held by anyone. If the
    disk cannot follow, the oldest blocks are dropped; if it fails, those that could not be written. Either is said
    once and counted. What was written before stays whole.
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
        self._given = given
        self._compress = compress
        self._max_bytes = max_bytes
        self._max_parts = max_parts
        self._descriptor: int | None = None
        self._begin(encoder, child)

    def _begin(self, encoder: Encoder, child: bool) -> None:
        self.path = name_for(self._given, child=child, compress=self._compress)
        self._encoder = encoder
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bytes_put = self._bytes_dropped = self._events_dropped = 0  # by who puts
        self._bytes_done = self._events_failed = 0  # by who writes
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._written = 0  # events in the part that is open
        self._part = 1
        self._full: deque[tuple[Path, int]] = deque()  # parts before that one, and their events
        self._warned = False
        self.removed = 0
        """How many events were in parts that had to go."""
        self.written = 0
        """How many events are in the parts that are there."""

    def after_fork(self, encoder: Encoder) -> TraceFile:
        """Become the file of a forked process, and let go of the other, which is its parent's."""
        if self._descriptor is not None and self._is_open():
            os.close(self._descriptor)
        self._descriptor = None
        self._begin(encoder, child=True)
        return self

    @property
    def clock_offset(self) -> int:
        """What is added to the monotonic clock, in nanoseconds."""
        return self._encoder.offset

    @property
    def lost(self) -> int:
        """How many events could not be written."""
        return self._events_dropped + self._events_failed + self._encoder.lost

    # For one thread that puts.

    def put(self, text: bytes, events: int) -> None:
        """Take a block of lines to write. Never waits for the disk."""
        block = self._pack(text)
        if self._max_bytes and events > 1 and len(block) + _FRAME > self._max_bytes:
            lines = text.splitlines(keepends=True)
            for some in (lines[: len(lines) // 2], lines[len(lines) // 2 :]):
                self.put(b"".join(some), sum(not line.startswith(NAMING) for line in some))
            return
        self._bytes_put += len(block)
        self._jobs.put((block, events))
        while self._waiting() > _MOST_WAITING and self._drop_oldest():
            pass
        self._ensure_thread()

    def _waiting(self) -> int:
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
        self._warn("the disk cannot follow")
        return True

    def _pack(self, text: bytes) -> bytes:
        if not self._compress:
            return text
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP, _MEMORY, zlib.Z_FILTERED)
        return packer.compress(text) + packer.flush()

    # For anyone.

    def flush(self) -> None:
        """Wait until what was put is written, or the disk is given up."""
        self._wait(threading.Event())

    def close(self) -> None:
        """Write what is waiting, and the end of the frame."""
        self._wait(_Last())

    def _wait(self, done: threading.Event) -> None:
        self._jobs.put(done)
        self._ensure_thread()
        seen = -1
        while not done.wait(_PATIENCE):
            if seen == self._bytes_done:
                self._warn("the disk does not answer")
                return
            seen = self._bytes_done

    def _ensure_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._work, name="pipesight-trace-file", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._jobs.put(_Last())
            self._work()

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("events of the trace %s are being lost: %s; training goes on", self.path, why)

    # For the thread that writes.

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, threading.Event):
                if isinstance(job, _Last):
                    self._close_part()
                job.set()
                if isinstance(job, _Last):
                    return
            else:
                self._write_block(*job)
                self._bytes_done += len(job[0])

    def _write_block(self, block: bytes, events: int) -> None:
        try:
            self._look_after_file()
            full = self._max_bytes and self._size + len(block) + _FRAME // 2 > self._max_bytes
            if full and self._descriptor is not None and self._written:
                self._full.append((self._part_path(), self._written))
                self._close_part()
                self._part += 1
                self._make_room()
            if self._descriptor is None:
                self._open()
            self._append(block)
        except OSError as error:
            self._fail(events, str(error))
            self._abandon()
        else:
            self._written += events
            self.written += events

    def _make_room(self) -> None:
        """Remove the oldest parts, if there are to be no more than so many."""
        while self._max_parts is not None and len(self._full) >= self._max_parts:
            path, events = self._full.popleft()
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self.removed += events
            self.written -= events

    def _fail(self, events: int, why: str) -> None:
        self._events_failed += events
        self._warn(why)

    def _open(self) -> None:
        path = self._part_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not _lock(self._descriptor):  # another process writes it, with nothing to tell us apart
            os.close(self._descriptor)
            self.path = name_for(self._given, child=True, compress=self._compress)
            self._descriptor = os.open(self._part_path(), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _lock(self._descriptor)
        found = os.fstat(self._descriptor)
        again = self._size > 0 and self._identity == (found.st_dev, found.st_ino)  # after a failure
        if not again:
            self._forget_file()
        self._identity = (found.st_dev, found.st_ino)
        os.ftruncate(self._descriptor, self._size)
        if not again:
            self._append(self._pack(self._encoder.header()))

    def _part_path(self) -> Path:
        if self._part == 1:
            return self.path
        suffixes = ".pfw.gz" if self._compress else ".pfw"
        return self.path.with_name(f"{self.path.name.removesuffix(suffixes)}.part{self._part}{suffixes}")

    def _append(self, block: bytes) -> None:
        assert self._descriptor is not None
        view = memoryview(block)
        at = self._size
        while view:
            done = os.pwrite(self._descriptor, view, at)
            view, at = view[done:], at + done
        self._size = at

    def _look_after_file(self) -> None:
        """Notice that others deleted the file, or closed its descriptor, which may be of another file now."""
        if self._descriptor is None:
            return
        if not self._is_open():
            self._descriptor = None
        elif os.fstat(self._descriptor).st_nlink == 0:
            self._abandon()
            self._forget_file()

    def _is_open(self) -> bool:
        assert self._descriptor is not None
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _forget_file(self) -> None:
        if self._written:
            self._fail(self._written, "the file was deleted")
            self.written -= self._written
        self._size = self._written = 0

    def _close_part(self) -> None:
        try:
            self._look_after_file()
            if self._descriptor is None and (self._size or self.lost):
                self._open()
            if self._descriptor is not None:
                self._append(self._pack(self._encoder.footer(self._written, self.lost)))
        except OSError as error:
            self._warn(str(error))
        self._abandon()
        self._size = self._written = 0

    def _abandon(self) -> None:
        """Close the file; cut off what a failed write may have left."""
        if self._descriptor is not None and self._is_open():
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None


def _lock(descriptor: int) -> bool:
    """Reserve a file for this process, as far as its file system can; tell whether no other one has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # it has no locks: then names alone have to do
    return True
