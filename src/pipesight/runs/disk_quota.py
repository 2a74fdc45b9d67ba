"""The disk quota of a rank: for the parts of its trace, the traces of processes that it starts, and its log.

The newest data stays: a long run is looked at for what happens now, and each part of a trace can be read alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from pathlib import Path

from pipesight.runs.directory import RunDirectory

__all__ = ["DiskQuota"]

_PARTS = 8


class DiskQuota:
    """Divides a number of bytes between trace and log, and removes traces that exceed it.

    Attributes:
        removed_events: How many events were in the files that were removed.
    """

    LEAST = 64 * 1024
    """Bytes. With less, a part of a trace would hold next to nothing."""
    MOST = 2**63 - 1
    """Bytes. No file system has more."""

    def __init__(self, directory: RunDirectory, max_bytes: int | None) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self.removed_events = 0

    @property
    def log_bytes(self) -> int | None:
        """Bytes for the log."""
        return None if self._max_bytes is None else self._max_bytes // 10

    @property
    def trace_bytes(self) -> int | None:
        """Bytes for all traces."""
        return None if self._max_bytes is None else self._max_bytes - self._max_bytes // 10

    @property
    def parts(self) -> int | None:
        """How many parts of a trace are kept."""
        return None if self._max_bytes is None else _PARTS

    @property
    def part_bytes(self) -> int | None:
        """Bytes for each part."""
        return None if self.trace_bytes is None else self.trace_bytes // _PARTS

    def enforce(self) -> None:
        """Remove the oldest traces of processes that have ended, until the rest is within the quota."""
        if self.trace_bytes is None:
            return
        files = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in self._directory.traces())
        total = sum(size for _, size, _ in files)
        for _, size, file in files:
            if total <= self.trace_bytes:
                break
            if _is_child(file) and _is_free(file):
                self.removed_events += _events_in(file)
                with contextlib.suppress(OSError):
                    file.unlink()
                total -= size


def _is_child(file: Path) -> bool:
    """Return whether a trace is of a process that the rank started; the rank removes parts of its own trace itself."""
    return any(part.isdecimal() for part in file.name.partition(".")[0].split("-")[2:])


def _is_free(file: Path) -> bool:
    """Return whether nobody is writing a trace: a writer holds a lock on it."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _events_in(file: Path) -> int:
    lines, packed = 0, b""
    with contextlib.suppress(OSError, zlib.error):
        packed = file.read_bytes()
        while packed:
            unpacker = zlib.decompressobj(31)
            lines += unpacker.decompress(packed).count(b'"ph":"X"')
            packed = unpacker.unused_data
    return lines
