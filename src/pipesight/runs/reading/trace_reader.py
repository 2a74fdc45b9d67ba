"""Read traces line by line: which files there are, and the events in each.

A file may be cut off anywhere, since processes are killed, and may still be growing. What can be read is read, and no
more than a few lines are held in memory.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from pipesight.runs.format import TRACE_SUFFIXES, part_order, split_suffix
from pipesight.runs.reading.safe_open import open_plain, without_refused

__all__ = ["NotATraceError", "TraceReader", "find_traces"]

_CHUNK = 2**18  # bytes
_LONGEST = 2**26  # bytes of a line; a trace has none like that
_GZIP = b"\x1f\x8b"
_WINDOW = 31  # zlib's number for gzip


class NotATraceError(ValueError):
    """A file is not a trace."""


class _DamagedError(Exception):
    """The rest of a file cannot be read."""


def find_traces(path: Path, *, refuse: Callable[[Path, str], None] | None = None) -> list[Path]:
    """Return the files of a trace: ``path`` and the parts that follow it, or all traces in a folder and below.

    Files that are not plain, or outside the folder, are skipped; ``refuse`` takes them, and why.

    >>> find_traces(Path("run/trace.pfw.gz"))
    [PosixPath('run/trace.pfw.gz'), PosixPath('run/trace.part2.pfw.gz')]

    Raises:
        FileNotFoundError: there is none.
    """
    if path.is_dir():
        found = without_refused((file for file in path.rglob("*") if file.name.endswith(TRACE_SUFFIXES)), path, refuse)
        if not found:
            raise FileNotFoundError(f"no trace in the folder {str(path)!r}: no file in it ends in .pfw.gz or .pfw")
        return sorted(found, key=part_order)
    if not path.exists():
        raise FileNotFoundError(f"no such file: {str(path)!r}")
    stem, suffix = split_suffix(path)
    pattern = re.compile(rf"{re.escape(stem)}\.part\d+{re.escape(suffix)}")
    parts = [file for file in path.parent.iterdir() if suffix and pattern.fullmatch(file.name)]
    return [path, *sorted(without_refused(parts, path.parent, refuse), key=part_order)]


class TraceReader:
    """The events of one file, plain or compressed.

    Example::

        reader = TraceReader(Path("trace.pfw.gz"))
        for line in reader:
            event = json.loads(line)
        if not reader.whole: ...

    Iterating raises `NotATraceError` before the first event, or yields all that can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = 0
        """How many events were read so far."""
        self.skipped = 0
        """Lines that are not events."""
        self.whole = False
        """Whether the trace was read to its end, undamaged."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield each event as a line of JSON, without its end."""
        begun = False
        try:
            with open_plain(self.path) as file:
                for raw in _lines(file):
                    line = raw.strip().removesuffix(b",")
                    if not line:
                        continue
                    is_event = _is_event(line)
                    if not begun and not is_event and line != b"[":
                        raise self._refusal(f"it begins with {line[:20].decode(errors='replace')!r}")
                    begun, self.whole = True, line == b"]"
                    if is_event:
                        self.events += 1
                        yield line
                    elif line not in (b"[", b"]"):
                        self.skipped += 1
        except _DamagedError as damage:
            if not begun:
                raise self._refusal(str(damage)) from None
            self.whole = False
        if not begun:
            raise self._refusal("it is empty")

    def _refusal(self, why: str) -> NotATraceError:
        return NotATraceError(f"not a trace: {str(self.path)!r} ({why}; a trace begins with a line '[')")


def _is_event(line: bytes) -> bool:
    try:
        event = _decode(line.decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(event, dict) and isinstance(event.get("ph"), str)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, except for a last one that was cut off."""
    pieces: list[bytes] = []  # of a line
    size, some = 0, False
    for text in _texts(file):
        piece, *others = text.split(b"\n")
        pieces.append(piece)
        size += len(piece)
        if size > _LONGEST:
            raise _DamagedError(f"a line in it is longer than {_LONGEST} bytes")
        if others:
            yield b"".join(pieces)
            yield from others[:-1]
            pieces, size, some = others[-1:], len(others[-1]), True
    rest = b"".join(pieces)
    if not some or rest.strip() == b"]" or _is_event(rest):
        yield rest


def _texts(file: BinaryIO) -> Iterator[bytes]:
    """Yield the text of a file piece by piece, up to where a gzip member is cut off."""
    chunk = file.read(_CHUNK)
    if not chunk.startswith(_GZIP):
        while chunk:
            yield chunk
            chunk = file.read(_CHUNK)
        return
    unpacker = zlib.decompressobj(_WINDOW)
    while chunk or (chunk := file.read(_CHUNK)):
        try:
            text = unpacker.decompress(chunk, _CHUNK)
        except zlib.error as error:
            raise _DamagedError(str(error)) from None
        yield text
        chunk = unpacker.unconsumed_tail
        if unpacker.eof:  # another member, or the zeros that a crash of the machine may leave
            chunk = unpacker.unused_data.lstrip(b"\0")
            unpacker = zlib.decompressobj(_WINDOW)
    with contextlib.suppress(zlib.error):
        yield unpacker.flush()
