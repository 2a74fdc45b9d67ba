"""Decompress a trace piece by piece, however damaged it is.

Traces are sequences of complete members, each with a checksum. A member that fails it is skipped, and the next one is
looked for. The last one may have been cut off, or be in the making: it is taken as far as it goes.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from pipesight.runs.reading.safe_open import open_plain

__all__ = ["Decompressor", "is_packed", "without_surrogates"]

_GZIP = b"\x1f\x8b"
_MEMBER = _GZIP + b"\x08"
_CHUNK = 2**18  # bytes
_HELD = 2**23  # bytes of a member's text that wait for its checksum; beyond, they are yielded unchecked
_WINDOW = 31  # zlib's number for gzip
_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_TRAILER = 8  # bytes at the end of a member
_TAIL = 64  # bytes


def is_packed(path: Path, start: bytes) -> bool:
    """Return whether a file is compressed, by its first bytes; where those are damaged, by its name."""
    return start.startswith(_GZIP) or (path.suffix == ".gz" and _MEMBER in start)


def without_surrogates(text: bytes) -> bytes:
    """Replace escaped lone surrogates in JSON, such as paths that are not valid Unicode have."""
    if b"\\" not in text or (b"\\ud" not in text and b"\\uD" not in text):  # the first test is fast, and mostly enough
        return text
    changed = _ESCAPES.sub(lambda found: b"\\ufffd" if found["half"] else found[0], text)
    return text if changed == text else changed


class Decompressor:
    """The text of a file, plain or compressed.

    Example::

        unpacker = Decompressor(Path("trace.pfw.gz"))
        for text in unpacker: ...
        if unpacker.damaged: ...
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = False
        """Whether the end of the last member is missing."""
        self.damaged = 0
        """Bytes of the file that fail their checksum."""
        self.unchecked = False
        """Whether text of a damaged member was yielded before the damage was found."""
        self.has_surrogates = False
        """Whether it has escaped lone surrogates, which not every JSON reader accepts."""
        self.tail = b""
        """The last bytes of the text."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text."""
        with open_plain(self.path) as file:
            if is_packed(self.path, file.read(_CHUNK)):
                yield from map(self._look_at, self._unpacked(_Bytes(file.fileno())))
            else:
                file.seek(0)
                yield from map(self._look_at, iter(lambda: file.read(_CHUNK), b""))

    def _look_at(self, text: bytes) -> bytes:
        self.tail = (self.tail + text[-_TAIL:])[-_TAIL:]
        if not self.has_surrogates and without_surrogates(text) is not text:
            self.has_surrogates = True
        return text

    def _unpacked(self, packed: _Bytes) -> Iterator[bytes]:
        begin, end = 0, packed.end()
        while begin < end:
            if packed.read(begin, begin + 2) != _GZIP:
                found = packed.find(_MEMBER, begin, end)
                self.damaged += 0 if packed.is_zero(begin, found) else found - begin
                begin = found
                continue
            member = _Member(packed, begin, end)
            held: list[bytes] = []
            size = sent = 0
            for text in member:
                held.append(text)
                size += len(text)
                if size - sent > _HELD:
                    yield from held
                    held, sent = [], size
            if member.is_damaged:
                self.unchecked |= sent > 0
                begin = packed.find(_MEMBER, begin + 1, end)
                self.damaged += begin - member.begin
                yield b"\n"  # the text before and the text after are different lines
                continue
            yield from held
            self.cut = not member.is_whole
            begin = member.at


class _Member:
    """The text of a member, and where it ends."""

    def __init__(self, packed: _Bytes, begin: int, end: int) -> None:
        self.packed, self.begin, self.end = packed, begin, end
        self.at = begin
        self.is_whole = self.is_damaged = False

    def __iter__(self) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(_WINDOW)
        while chunk := self.packed.read(self.at, min(self.at + _CHUNK, self.end)):
            self.at += len(chunk)
            while chunk:
                try:
                    text = unpacker.decompress(chunk, 4 * _CHUNK)
                except zlib.error:
                    self.is_damaged = True
                    return
                yield text
                if unpacker.eof:
                    self.at -= len(unpacker.unused_data)
                    self.is_whole = True
                    return
                chunk = unpacker.unconsumed_tail
        with contextlib.suppress(zlib.error):  # a checksum and a size may end in zeros, which `end` takes for others
            unpacker.decompress(bytes(_TRAILER))
            self.is_whole = unpacker.eof


class _Bytes:
    """The bytes of an open file by their places. It may shrink meanwhile, so it is not mapped into memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, begin: int, end: int) -> bytes:
        return os.pread(self._descriptor, max(end - begin, 0), begin)

    def find(self, word: bytes, begin: int, end: int) -> int:
        """Return where a word is, or ``end``."""
        while chunk := self.read(begin, min(begin + _CHUNK, end)):
            found = chunk.find(word)
            if found >= 0:
                return begin + found
            begin += max(len(chunk) - len(word) + 1, 1)
        return end

    def is_zero(self, begin: int, end: int) -> bool:
        return all(not self.read(at, min(at + _CHUNK, end)).strip(b"\0") for at in range(begin, end, _CHUNK))

    def end(self) -> int:
        """Return where the file ends, but for the zeros that a crash of the machine may leave behind."""
        size = os.fstat(self._descriptor).st_size
        end = size
        while end and not (solid := self.read(max(end - _CHUNK, 0), end).rstrip(b"\0")):
            end = max(end - _CHUNK, 0)
        end = max(end - _CHUNK, 0) + len(solid) if end else 0
        return size if size - end < _TRAILER else end
