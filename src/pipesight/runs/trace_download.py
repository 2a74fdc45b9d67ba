"""The trace of a run as one download: a compressed Chrome trace of all its files, by one clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from pipesight.runs.chrome_trace import chrome_trace
from pipesight.runs.reading.trace_reader import TraceReader, find_traces

__all__ = ["trace_download"]

_LEVEL = 4  # of gzip: a seventh smaller than 3, and faster than 6
_GZIP = 31  # zlib's number for it


def trace_download(run: Path) -> Iterator[bytes]:
    """Return the bytes to send, piece by piece; ``FileNotFoundError`` if the run has no trace."""
    return _packed(find_traces(run), run)


def _packed(files: list[Path], run: Path) -> Iterator[bytes]:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    for text in chrome_trace(map(TraceReader, files), run, skip_unreadable=True):
        if packed := packer.compress(text):
            yield packed
    yield packer.flush()
