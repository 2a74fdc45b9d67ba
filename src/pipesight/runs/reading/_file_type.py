"""The type of a file, by its first bytes: one event per line, a Chrome trace, other JSON lines, or something else."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from pipesight.runs.format import TRACE_SUFFIXES
from pipesight.runs.reading._decompression import is_packed
from pipesight.runs.reading.safe_open import open_plain

__all__ = ["FileType", "Sniffed", "sniff"]

FileType: TypeAlias = Literal["lines", "chrome", "records", "empty", "other"]
"""One event per line; events in one JSON value; other JSON objects, one per line; nothing; something else."""

_START = 2**16  # bytes that tell what a file is
_LINES = 200  # and how many lines


@dataclass(frozen=True, slots=True)
class Sniffed:
    """What the first bytes of a file show."""

    form: FileType
    packed: bool = False
    bracketed: bool = False
    pid: int | None = None


def sniff(path: Path) -> Sniffed:
    """Return the type of a file, whether it is compressed, and which process wrote it."""
    with open_plain(path) as file:
        start = file.read(_START)
    if packed := is_packed(path, start):
        try:
            start = zlib.decompressobj(31).decompress(start, _START)
        except zlib.error:
            return Sniffed("lines", packed)  # perhaps there is something further on
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.strip(b"\0"):
        return Sniffed("empty" if not packed or start or _is_small(path) else "lines", packed)
    lines = text.split(b"\n")[:_LINES]
    first = lines[0].strip()
    objects = (value for line in lines if isinstance(value := _parsed(line), dict))
    event = next((value for value in objects if "ph" in value), None)
    pid = event.get("pid") if event is not None else None
    start_of = Sniffed(_form(first, lines, text, is_event=event is not None), packed, first == b"[")
    if start_of.form == "other" and path.name.endswith(TRACE_SUFFIXES):
        return replace(start_of, form="lines")
    return replace(start_of, pid=pid) if isinstance(pid, int) else start_of


def _form(first: bytes, lines: Sequence[bytes], text: bytes, *, is_event: bool) -> FileType:
    """Return the type of a file with these first lines; ``is_event``: whether one of them is an event."""
    value = _parsed(first)
    if isinstance(value, dict):
        return "chrome" if "traceEvents" in value else "lines" if is_event else "records"
    if text.startswith(b"{") and b'"traceEvents"' in text:
        return "chrome"
    if first == b"[":
        second = next((line.strip() for line in lines[1:] if line.strip()), b"]")
        has_comma = second.endswith(b",") and isinstance(_parsed(second[:-1]), dict)
        return "chrome" if has_comma or (second.startswith(b"{") and not is_event) else "lines"
    if text.startswith(b"["):
        return "chrome" if text[1:].lstrip().startswith(b"{") else "lines" if is_event else "other"
    if is_event:
        return "lines"
    if text.startswith(b"{") and len(text) > _START // 2:  # the list of events may come further on
        return "chrome"
    return "records" if any(isinstance(_parsed(line), dict) for line in lines) else "other"


def _is_small(path: Path) -> bool:
    return path.stat().st_size < 64  # bytes: a member without any text


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
