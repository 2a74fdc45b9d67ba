"""Read traces line by line: which files there are, and the events in each.

A file may be cut off anywhere, since processes are killed, and may still be growing. What can be read is read, and no
more than a few lines, or a member of a compressed file, are held in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from pipesight.runs.format import TRACE_SUFFIXES, part_order, split_suffix
from pipesight.runs.reading._decompression import Decompressor
from pipesight.runs.reading.safe_open import without_refused

__all__ = ["NotATraceError", "TraceReader", "find_traces"]

_LONGEST = 2**24  # bytes of a line; a trace has none like that


class NotATraceError(ValueError):
    """A file is not a trace."""


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
        text, begun = Decompressor(self.path), False
        for raw in _lines(text):
            line = raw.strip(b"\0 \t\r").removesuffix(b",")
            if not line:
                continue
            is_event = _is_event(line)
            if not begun and not is_event and line != b"[":
                raise self._refusal(f"it begins with {line[:20].decode(errors='replace')!r}")
            begun, self.whole = True, line == b"]" and not text.damaged
            if is_event:
                self.events += 1
                yield line
            elif line not in (b"[", b"]"):
                self.skipped += 1
        if not begun:
            raise self._refusal("it is damaged" if text.damaged else "it is empty")

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


def _lines(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, except for a last one that was cut off, and for those that are too long."""
    rest, some = b"", False
    for text in texts:
        *lines, rest = (rest + text).split(b"\n")
        yield from lines
        some |= bool(lines)
        if len(rest) > _LONGEST:
            rest = b""
    if not some or rest.strip() == b"]" or _is_event(rest):
        yield rest
