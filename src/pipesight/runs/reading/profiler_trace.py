"""The events of traces of PyTorch's profiler, line by line, with times that those of several ranks have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipesight.runs.format import TRACE_SUFFIXES
from pipesight.runs.reading._decompression import Decompressor
from pipesight.runs.reading._file_type import sniff
from pipesight.runs.reading._foreign_formats import ChromeReader
from pipesight.runs.reading.safe_open import without_refused

__all__ = ["ProfilerTrace", "profiler_traces"]

_SUFFIXES = (".json", ".json.gz")
_APART = 10_000_000  # more than a system has processes


def profiler_traces(path: Path) -> list[ProfilerTrace]:
    """Return the traces of PyTorch's profiler in a folder and below, unless it has others; or the file if it is one."""
    if path.is_dir():
        files = sorted(without_refused(path.rglob("*"), path))
        if any(file.name.endswith(TRACE_SUFFIXES) for file in files):
            return []
        files = [file for file in files if file.name.endswith(_SUFFIXES)]
    else:
        files = [path] if path.is_file() and not path.name.endswith(TRACE_SUFFIXES) else []
    found = [ProfilerTrace(file, k) for k, file in enumerate(file for file in files if sniff(file).form == "chrome")]
    found = [trace for trace in found if not trace.empty]
    first = min((trace.shift for trace in found), default=0)
    for trace in found:
        trace.shift -= first
    return found


class ProfilerTrace:
    """The events of one file, which has the interface of a `TraceReader`.

    Its ``number`` is its place among those that are put into one file. Its processes get numbers that no other has:
    each rank calls its GPU process 0.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self._number = path, number
        self.events = self.skipped = 0
        self.whole = False
        reader = ChromeReader(Decompressor(path))
        self.empty = next(iter(reader), None) is None
        self.shift = reader.shift
        """Microseconds to add to the times."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield each event as a line of JSON, without its end."""
        reader = ChromeReader(Decompressor(self.path))
        for line in reader:
            yield self._moved(line)
            self.events += 1
        self.skipped, self.whole = reader.skipped, reader.ended

    def _moved(self, line: bytes) -> bytes:
        if not self.shift and not self._number:
            return line
        event: dict[str, Any] = json.loads(line)
        if type(event.get("pid")) is int:
            event["pid"] += self._number * _APART
        if isinstance(event.get("ts"), int | float):
            event["ts"] = round(event["ts"] + self.shift, 3)
        return json.dumps(event).encode()
