"""The trace of a run in one piece, for viewers: a single file as it is, several as one JSON object, compressed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from pipesight.runs.reading.safe_open import RefusedError, open_plain
from pipesight.runs.reading.trace_reader import NotATraceError, TraceReader, find_traces

__all__ = ["TraceDownload"]

_CHUNK = 2**18  # bytes
_LEVEL = 4  # of gzip: a seventh smaller than 3, and faster than 6
_GZIP = 31  # zlib's number for it


class TraceDownload:
    """The bytes of a trace, piece by piece.

    Raises:
        FileNotFoundError: There is no trace.
    """

    def __init__(self, run: Path) -> None:
        self._files = find_traces(run)
        self.name = f"{run.absolute().name}.json.gz"
        self.size: int | None = None
        """In bytes, where it is known before all has been read."""
        self._file: BinaryIO | None = None
        if len(self._files) == 1:
            self._open(self._files[0])

    def _open(self, path: Path) -> None:
        try:
            self._file = open_plain(path)
        except RefusedError as error:
            raise FileNotFoundError(f"no trace: {str(path)!r}: {error.strerror}") from None
        self.name, self.size = path.name, os.fstat(self._file.fileno()).st_size

    def __iter__(self) -> Iterator[bytes]:
        return self._joined() if self._file is None else self._as_it_is(self._file.fileno())

    def _as_it_is(self, descriptor: int) -> Iterator[bytes]:
        assert self.size is not None
        at = 0
        while at < self.size and (chunk := os.pread(descriptor, min(_CHUNK, self.size - at), at)):
            yield chunk
            at += len(chunk)

    def _joined(self) -> Iterator[bytes]:
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        for text in _chrome(self._files):
            if packed := packer.compress(text):
                yield packed
        yield packer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _chrome(files: list[Path]) -> Iterator[bytes]:
    between = b'{"traceEvents":[\n'
    for path in files:
        try:
            for line in TraceReader(path):
                yield between + line
                between = b",\n"
        except (NotATraceError, OSError):
            continue
    yield b"\n]}\n" if between == b",\n" else between + b"]}\n"
