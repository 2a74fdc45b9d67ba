"""The trace of a run as one download: a single file as it is, several joined into a compressed Chrome trace."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from pipesight.runs.chrome_trace import chrome_trace
from pipesight.runs.reading.safe_open import RefusedError, open_plain
from pipesight.runs.reading.trace_reader import TraceReader, find_traces

__all__ = ["TraceDownload"]

_CHUNK = 2**18  # bytes
_LEVEL = 4  # of gzip: a seventh smaller than 3, and faster than 6
_GZIP = 31  # zlib's number for it


class TraceDownload:
    """The bytes to send, piece by piece; ``FileNotFoundError`` if the run has no trace."""

    def __init__(self, run: Path) -> None:
        self._run, self._files = run, find_traces(run)
        self.name = f"{run.absolute().name}.json.gz"
        self.size: int | None = None
        """In bytes; ``None`` if it is not known in advance."""
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
        for text in chrome_trace(map(TraceReader, self._files), self._run, skip_unreadable=True):
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
