"""The files of a trace on disk: complete gzip members, so that they can be read at any time, whatever ends the process.

A file starts with the encoder's header and ends with its footer. With ``max_bytes``, another part is started before one
grows beyond that; with ``max_parts``, the oldest parts are removed::

    run.pfw.gz         header  block  block  block  footer
    run.part2.pfw.gz   header  block  ...

One thread calls this. Other code of the process may delete the file or close its descriptor: that is noticed before
each write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pipesight.trace._encode import Encoder
from pipesight.trace._file_names import is_device, part_path, trace_path

__all__ = ["PartFiles"]

_WRITE = 2**17  # bytes written at once
_FRAME = 1024  # bytes of a header and a footer, about
_LEVEL = 4  # the first with lazy matching: files are a seventh smaller than at 3, and it is faster than 6
_MEMORY = 7  # of 9: smaller tables, which stay in the cache
_GZIP = 31  # zlib's number for the format


class PartFiles:
    """Appends blocks to the current part.

    ``given`` is the path that was asked for; ``child`` adds the process ID to the name. ``lost`` returns how many
    events of the trace have been lost, for footers; ``warn`` is called with the reason when events cannot be written.
    """

    def __init__(
        self,
        given: Path,
        *,
        encoder: Encoder,
        child: bool,
        compress: bool,
        max_bytes: int | None,
        max_parts: int | None,
        lost: Callable[[], int],
        warn: Callable[[str], None],
    ) -> None:
        self._given, self._encoder, self._compress = given, encoder, compress
        self._max_bytes, self._max_parts = max_bytes, max_parts
        self._lost, self._warn = lost, warn
        self.path = trace_path(given, child=child, compress=compress)
        """The first part."""
        self._is_device = is_device(self.path)
        self._descriptor: int | None = None
        self._identity: tuple[int, int] | None = None  # of the file behind the descriptor
        self._part = 1
        self._size = 0  # bytes of the current part
        self._events = 0  # in the current part
        self._lost_before = 0  # events that the footers of earlier parts count
        self._full: deque[tuple[Path, int, int]] = deque()  # earlier parts: path, events, lost events
        self.written = 0
        """Events in the existing parts."""
        self.removed = 0
        """Events in parts that ``max_parts`` removed."""
        self.failed = 0
        """Events that could not be written."""
        self.writes = 0
        """Calls of the operating system that wrote something: a sign of progress."""

    def pack(self, text: bytes) -> bytes:
        """Return the block that a file holds for these lines."""
        if not self._compress:
            return text
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP, _MEMORY, zlib.Z_FILTERED)
        return packer.compress(text) + packer.flush()

    def fits(self, block: bytes) -> bool:
        """Tell whether a block is small enough for a part of its own."""
        return not self._max_bytes or len(block) + _FRAME <= self._max_bytes

    def write(self, block: bytes, events: int) -> None:
        """Append a block. If that fails, count its events as failed."""
        try:
            self._check_file()
            if self._is_full(block):
                self._finish_part()
                self._remove_oldest()
            if self._descriptor is None:
                self._open()
            self._append(block)
        except Exception as error:  # of the disk, or a bug: training continues
            self._fail(events, str(error) or type(error).__name__)
            self._abandon()
        else:
            self._events += events
            self.written += events

    def close(self, *, keep_if_empty: bool = False) -> None:
        """Write the footer, and close the file; ``keep_if_empty`` creates one if there is none."""
        try:
            self._check_file()
            if self._descriptor is None and (self._size or self._lost() or (keep_if_empty and self._part == 1)):
                self._open()
            if self._descriptor is not None:
                lost = self._lost()
                self._append(self.pack(self._encoder.footer(self._events, lost - self._lost_before)))
                self._lost_before = lost
        except Exception as error:
            self._warn(str(error) or type(error).__name__)
        self._abandon()
        self._size = self._events = 0

    def release(self) -> None:
        """Close the descriptor, and leave the file to the process that this one was forked from."""
        if self._descriptor is not None and self._is_open():
            os.close(self._descriptor)
        self._descriptor = None

    # Parts.

    def _is_full(self, block: bytes) -> bool:
        if not self._max_bytes or self._is_device or self._descriptor is None or not self._events:
            return False
        return self._size + len(block) + _FRAME // 2 > self._max_bytes

    def _finish_part(self) -> None:
        path, events, lost_before = self._part_path(), self._events, self._lost_before
        self.close()
        self._full.append((path, events, self._lost_before - lost_before))
        self._part += 1

    def _remove_oldest(self) -> None:
        while self._max_parts is not None and len(self._full) >= self._max_parts:
            path, events, lost = self._full.popleft()
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self._lost_before -= lost  # the next footer counts them
            self.removed += events
            self.written -= events

    def _part_path(self) -> Path:
        return part_path(self.path, self._part, compress=self._compress)

    # The current file.

    def _open(self) -> None:
        if self._is_device:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            self._identity = _identity(self._descriptor)
            if not self._size:
                self._append(self.pack(self._encoder.header()))
            return
        self._part_path().parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = _open_or_create(self._part_path())
        if not _lock(self._descriptor):  # a process that was asked for the same path is writing it
            os.close(self._descriptor)
            self.path = trace_path(self._given, child=True, compress=self._compress)
            self._descriptor = _open_or_create(self._part_path())
            _lock(self._descriptor)
        found = _identity(self._descriptor)
        reopened = self._size > 0 and self._identity == found  # after a failed write
        if not reopened:
            self._start_over()
        self._identity = found
        os.ftruncate(self._descriptor, self._size)
        if not reopened:
            self._append(self.pack(self._encoder.header()))

    def _append(self, block: bytes) -> None:
        assert self._descriptor is not None
        rest, end = memoryview(block), self._size
        while rest:
            some = rest[:_WRITE]
            done = os.write(self._descriptor, some) if self._is_device else os.pwrite(self._descriptor, some, end)
            rest, end = rest[done:], end + done
            self.writes += 1
        self._size = end

    def _check_file(self) -> None:
        """Notice that the file was deleted, or its descriptor closed, which may belong to another file now."""
        if self._descriptor is None:
            return
        if not self._is_open():
            self._descriptor = None
        elif not self._is_device and os.fstat(self._descriptor).st_nlink == 0:
            self._abandon()
            self._start_over()

    def _is_open(self) -> bool:
        assert self._descriptor is not None
        try:
            return _identity(self._descriptor) == self._identity
        except OSError:
            return False

    def _start_over(self) -> None:
        if self._events:
            self._fail(self._events, "the file was deleted")
            self.written -= self._events
        self._size = self._events = 0

    def _fail(self, events: int, why: str) -> None:
        self.failed += events
        self._warn(why)

    def _abandon(self) -> None:
        """Close the file, without what a failed write may have left at its end."""
        if self._descriptor is not None and self._is_open():
            if not self._is_device:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            with contextlib.suppress(OSError):  # a process being forked shares the descriptor, and so the lock
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None


def _open_or_create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _lock(descriptor: int) -> bool:
    """Reserve a file for this process; return false if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks: names have to do
    return True
