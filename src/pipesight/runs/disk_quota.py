"""How much of the disk a rank may take: parts of its trace, those of the processes that it starts, and its log.

What is newest stays. A long run is looked at because of what happens now, and each part can be read by itself.
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
    """Shares out a number of bytes, and removes what is too much.

    Attributes:
        removed: How many events were in the files that had to go.
    """

    LEAST = 64 * 1024
    """With less, a part would hold next to nothing."""

    def __init__(self, directory: RunDirectory, max_bytes: int | None) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self.removed = 0

    @property
    def log_bytes(self) -> int | None:
        """What the log may take."""
        return None if self._max_bytes is None else self._max_bytes // 10

    @property
    def trace_bytes(self) -> int | None:
        """What all traces may take."""
        return None if self._max_bytes is None else self._max_bytes - self._max_bytes // 10

    @property
    def parts(self) -> int | None:
        """How many parts of a trace are kept."""
        return None if self._max_bytes is None else _PARTS

    @property
    def part_bytes(self) -> int | None:
        """What one of them may take."""
        return None if self.trace_bytes is None else self.trace_bytes // _PARTS

    def make(self) -> None:
        """Remove the oldest traces, of processes that have ended, until what is left is little enough."""
        if self.trace_bytes is None:
            return
        files = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in self._directory.traces())
        total = sum(size for _, size, _ in files)
        for _, size, file in files:
            if total <= self.trace_bytes:
                break
            if _is_child(file) and _is_free(file):
                self.removed += _events_in(file)
                with contextlib.suppress(OSError):
                    file.unlink()
                total -= size


def _is_child(file: Path) -> bool:
    """Tell whether a trace is that of a process which the rank has started; the rank removes its own parts."""
    return any(part.isdecimal() for part in file.name.partition(".")[0].split("-")[2:])


def _is_free(file: Path) -> bool:
    """Tell whether nobody writes a trace any more: whoever does has locked it."""
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
