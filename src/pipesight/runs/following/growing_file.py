"""A file that grows while it is read: each look returns the new lines, at the cost of those alone.

A trace grows by complete gzip members of whole lines; statistics and logs grow by whole lines. A look may come in the
middle of either; what is incomplete is kept for the next one.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from pipesight.runs.reading.safe_open import open_plain

__all__ = ["GrowingFile"]

_CHUNK = 2**18  # bytes
_LONGEST = 2**26  # bytes of a line; ours have none like that
_WINDOW = 31  # zlib's number for gzip
_MAGIC = b"\x1f\x8b"
_MEMBER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
"""How our gzip members begin: without name and time. Eight bytes do not occur by chance."""


class GrowingFile:
    """The lines of a growing file.

    Example::

        file = GrowingFile(Path("RUN/trace/rank-00000.pfw.gz"))
        while True:
            for line in file.new_lines(most=2**22): ...
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_out = 0
        """Bytes on disk that were skipped: too many came at once, or they were damaged."""
        self._identity: tuple[int, int] | None = None
        self._start()

    def _start(self) -> None:
        self._at = 0  # in the file
        self._packed: bool | None = None  # not known yet
        self._unpacker = zlib.decompressobj(_WINDOW)
        self._inside = False  # a gzip member
        self._rest = b""  # of a line

    def new_lines(self, *, most: int | None = None) -> list[bytes]:
        """Return the complete lines that were added since the last call, without line ends.

        If there are more than ``most`` bytes on disk, the first of them are skipped.

        Raises:
            OSError: the file is gone, or cannot be read.
        """
        with open_plain(self.path) as file:
            descriptor = file.fileno()
            found = os.fstat(descriptor)
            identity = (found.st_dev, found.st_ino)
            if identity != self._identity or found.st_size < self._at:  # another file, or truncated
                self._start()
            self._identity = identity
            if self._packed is None:
                self._packed = _is_packed(descriptor)
            if self._packed is None:
                return []
            if most is not None and found.st_size - self._at > most:
                self._skip(descriptor, found.st_size - most, found.st_size)
            return self._read(descriptor, found.st_size)

    def _skip(self, descriptor: int, target: int, size: int) -> None:
        """Continue at the first member or line from ``target`` on; if there is none, skip nothing."""
        mark = _MEMBER if self._packed else b"\n"
        found = _find(descriptor, mark, target, size)
        if found is not None:
            self._jump(found if self._packed else found + 1)

    def _jump(self, to: int) -> None:
        self.left_out += to - self._at
        self._at, self._inside, self._rest = to, False, b""

    def _read(self, descriptor: int, size: int) -> list[bytes]:
        lines: list[bytes] = []
        while self._at < size and (chunk := os.pread(descriptor, min(_CHUNK, size - self._at), self._at)):
            text, done = self._unpack(chunk) if self._packed else (chunk, len(chunk))
            self._at += done
            first, *others = text.split(b"\n")
            self._rest += first
            if others:
                lines += [self._rest, *others[:-1]]
                self._rest = others[-1]
            if len(self._rest) > _LONGEST:
                self._rest = b""
            if done < len(chunk):  # damaged here
                found = _find(descriptor, _MEMBER, self._at + 1, size)
                self._jump(size if found is None else found)
        return lines

    def _unpack(self, chunk: bytes) -> tuple[bytes, int]:
        """Return the text of a chunk, and how many of its bytes could be read."""
        texts = []
        left = chunk
        while left:
            if not self._inside:
                left = left.lstrip(b"\0")  # a crash of the machine may leave zeros
                if not left:
                    break
                self._unpacker, self._inside = zlib.decompressobj(_WINDOW), True
            try:
                texts.append(self._unpacker.decompress(left))
            except zlib.error:
                return b"".join(texts), len(chunk) - len(left)
            left = self._unpacker.unused_data
            self._inside = not self._unpacker.eof
        return b"".join(texts), len(chunk)


def _is_packed(descriptor: int) -> bool | None:
    start = os.pread(descriptor, len(_MAGIC), 0)
    return None if len(start) < len(_MAGIC) else start == _MAGIC


def _find(descriptor: int, mark: bytes, start: int, stop: int) -> int | None:
    """Return the first position of ``mark`` between two positions."""
    at = start
    while at < stop:
        chunk = os.pread(descriptor, min(_CHUNK, stop - at), at)
        if (found := chunk.find(mark)) >= 0:
            return at + found
        if len(chunk) < len(mark):
            return None
        at += len(chunk) - len(mark) + 1
    return None
