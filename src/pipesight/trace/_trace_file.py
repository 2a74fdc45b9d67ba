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

from pipesight._launcher import launched_rank, restarts, with_attempt
from pipesight._logger import own_logger
from pipesight._plurals import count_of
from pipesight.trace._encode import NAMING, Encoder
from pipesight.trace._waiting import wait

__all__ = ["TraceFile", "is_device", "name_for"]

logger = own_logger(__name__)

_MOST_WAITING = 64 * 2**20  # bytes
_PIECE = 2**17  # bytes that are written at once: each is progress
_PATIENCE = 10.0  # seconds without such a piece, after which nobody waits any longer
_FRAME = 1024  # bytes that the frame of a part takes, about
_LEVEL = 4  # the first that finds matches lazily: a seventh smaller than 3, and faster than 6
_MEMORY = 7  # of 9: smaller tables, that stay in cache
_GZIP = 31  # zlib's number for it


def name_for(given: Path, *, child: bool, compress: bool) -> Path:
    """Return the file of this process: the one that was asked for, with rank and process number where others share it.

    >>> name_for(Path("run.pfw"), child=False, compress=True)
    PosixPath('run.pfw.gz')
    """
    if is_device(given):
        return given
    name = given.name
    for suffix in (".gz", ".pfw"):
        name = name.removesuffix(suffix)
    if os.environ.get("WORLD_SIZE", "1") != "1" and launched_rank() is not None and not _is_of_rank(name):
        name += f"-rank-{launched_rank():05}"
    name = with_attempt(name, restarts())
    if child:
        name += f"-{os.getpid()}"
    return given.with_name(f"{name}.pfw.gz" if compress else f"{name}.pfw")


def is_device(path: Path) -> bool:
    """Tell whether there is something that is neither a file nor a folder, as ``/dev/null``."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_of_rank(name: str) -> bool:
    own = f"rank-{launched_rank():05}"
    return name == own or name.startswith(f"{own}-restart-")


class _Last(threading.Event):
    """Behind the last block: write the end of the frame, and be done."""


_Job: TypeAlias = tuple[bytes, int] | threading.Event
"""A block and its number of events, or someone who waits for all that was put before."""


class TraceFile:
    """A trace on disk. It is made when the first event comes.

    One thread puts blocks in, another writes them; each has counters of its own, and nobody waits for a lock. If the
    disk cannot follow, the oldest blocks are dropped; if it fails, those that could not be written; if it does not
    answer at the end, those that wait. It is said at once, and how many there were at the end. What was written before
    stays whole.

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
        self._given = given
        self._compress = compress
        self._max_bytes = max_bytes
        self._max_parts = max_parts
        self._descriptor: int | None = None
        self._begin(encoder, child)

    def _begin(self, encoder: Encoder, child: bool) -> None:
        self.path = name_for(self._given, child=child, compress=self._compress)
        self._encoder = encoder
        self._is_device = is_device(self.path)
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._writing = threading.Lock()
        self._closing = False
        self._closed = threading.Event()
        self._events_put = self._bytes_put = self._bytes_dropped = self._events_dropped = 0  # by who puts
        self._events_done = self._bytes_done = self._events_failed = self._pieces = 0  # by who writes
        self._given_up = 0  # events, by who closes
        self._lost_before = 0  # in the counts of the parts before
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._written = 0  # events in the part that is open
        self._part = 1
        self._full: deque[tuple[Path, int, int]] = deque()  # parts before that one, their events, the lost ones
        self._warned = False
        self._lost_said = 0
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
        return self._events_dropped + self._events_failed + self._given_up + self._encoder.lost

    # For one thread that puts.

    def put(self, text: bytes, events: int) -> None:
        """Take a block of lines to write. Never waits for the disk."""
        if self._closing:  # of a thread that records on while the process ends
            self._events_dropped += events
            return
        block = self._pack(text)
        if self._max_bytes and events > 1 and len(block) + _FRAME > self._max_bytes:
            lines = text.splitlines(keepends=True)
            for some in (lines[: len(lines) // 2], lines[len(lines) // 2 :]):
                self.put(b"".join(some), sum(not line.startswith(NAMING) for line in some))
            return
        self._bytes_put += len(block)
        self._events_put += events
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
        self._say("the disk is too slow")
        return True

    def _pack(self, text: bytes) -> bytes:
        if not self._compress:
            return text
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP, _MEMORY, zlib.Z_FILTERED)
        return packer.compress(text) + packer.flush()

    # For anyone.

    def flush(self) -> None:
        """Wait until what was put is written, or the disk is given up."""
        if not self._closing:
            self._wait(threading.Event())

    def close(self) -> None:
        """Write what is waiting, and the end of the frame; say how many events were lost."""
        if not self._closing:
            self._closing = True
            self._jobs.put(_Last())
        if not self._wait(self._closed):
            self._given_up = self._events_put - self._events_dropped - self._events_done
        self.say_lost()

    def say_lost(self) -> None:
        """Say how many events were lost, unless that was said."""
        if self.lost != self._lost_said:
            self._lost_said = self.lost
            logger.warning("lost %s of the trace %s", count_of(self.lost, "event"), self.path)

    def _wait(self, done: threading.Event) -> bool:
        if self._thread is None and not self._events_put and not self.lost:
            return True  # there is no file, and none to be made
        if done is not self._closed:
            self._jobs.put(done)

        def is_done(seconds: float) -> bool:
            if not self._ensure_thread():
                self._work(until=done)
            return done.wait(seconds)

        if wait(is_done, lambda: (self._events_done, self._pieces), _PATIENCE):
            return True
        self._say("the disk does not respond")
        return False

    def _ensure_thread(self) -> bool:
        """Start the thread that writes, unless it runs, or is being started; return false if it cannot be."""
        if self._thread is not None and self._thread.is_alive():
            return True
        if not self._starting.acquire(blocking=False):
            return True
        try:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="pipesight-trace-file", daemon=True)
                self._thread.start()
        except RuntimeError:  # the interpreter is shutting down
            return False
        finally:
            self._starting.release()
        return True

    def _say(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("events of the trace %s are being lost: %s; training continues", self.path, why)

    # For the thread that writes.

    def _work(self, until: threading.Event | None = None) -> None:
        while not self._closed.is_set() and not (until is not None and until.is_set()):
            with self._writing:
                if not self._closed.is_set():
                    self._do(self._jobs.get())

    def _do(self, job: _Job) -> None:
        if isinstance(job, _Last):
            self._close_part()
            self._closed.set()
        elif isinstance(job, threading.Event):
            job.set()
        elif not self._given_up:
            self._write_block(*job)
            self._bytes_done += len(job[0])
            self._events_done += job[1]

    def _write_block(self, block: bytes, events: int) -> None:
        try:
            self._look_after_file()
            full = self._max_bytes and self._size + len(block) + _FRAME // 2 > self._max_bytes
            if full and self._descriptor is not None and self._written and not self._is_device:
                path, written, lost_before = self._part_path(), self._written, self._lost_before
                self._close_part()
                self._full.append((path, written, self._lost_before - lost_before))
                self._part += 1
                self._make_room()
            if self._descriptor is None:
                self._open()
            self._append(block)
        except Exception as error:  # the disk's, or of ours: training continues
            self._fail(events, str(error) or type(error).__name__)
            self._abandon()
        else:
            self._written += events
            self.written += events

    def _make_room(self) -> None:
        """Remove the oldest parts, if there are to be no more than so many."""
        while self._max_parts is not None and len(self._full) >= self._max_parts:
            path, events, lost = self._full.popleft()
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self._lost_before -= lost  # the next part counts them
            self.removed += events
            self.written -= events

    def _fail(self, events: int, why: str) -> None:
        self._events_failed += events
        self._say(why)

    def _open(self) -> None:
        if self._is_device:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            self._identity = _identity(self._descriptor)
            if not self._size:
                self._append(self._pack(self._encoder.header()))
            return
        path = self._part_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not _lock(self._descriptor):  # another process writes it, with nothing to tell us apart
            os.close(self._descriptor)
            self.path = name_for(self._given, child=True, compress=self._compress)
            self._descriptor = os.open(self._part_path(), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _lock(self._descriptor)
        found = _identity(self._descriptor)
        again = self._size > 0 and self._identity == found  # after a failure
        if not again:
            self._forget_file()
        self._identity = found
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
            piece = view[:_PIECE]
            done = os.write(self._descriptor, piece) if self._is_device else os.pwrite(self._descriptor, piece, at)
            view, at = view[done:], at + done
            self._pieces += 1
        self._size = at

    def _look_after_file(self) -> None:
        """Notice that others deleted the file, or closed its descriptor, which may be of another file now."""
        if self._descriptor is None:
            return
        if not self._is_open():
            self._descriptor = None
        elif not self._is_device and os.fstat(self._descriptor).st_nlink == 0:
            self._abandon()
            self._forget_file()

    def _is_open(self) -> bool:
        assert self._descriptor is not None
        try:
            return _identity(self._descriptor) == self._identity
        except OSError:
            return False

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
                lost = self.lost
                self._append(self._pack(self._encoder.footer(self._written, lost - self._lost_before)))
                self._lost_before = lost
        except Exception as error:
            self._say(str(error) or type(error).__name__)
        self._abandon()
        self._size = self._written = 0

    def _abandon(self) -> None:
        """Close the file; cut off what a failed write may have left."""
        if self._descriptor is not None and self._is_open():
            if not self._is_device:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            with contextlib.suppress(OSError):  # a process that is being forked has the descriptor, too, and the lock
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _lock(descriptor: int) -> bool:
    """Reserve a file for this process, as far as its file system can; tell whether no other one has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # it has no locks: then names alone have to do
    return True
