"""The trace of a run in one piece, for viewers: a single file as it is, several as one JSON object, compressed."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pipesight.report.reading.traces import NotATraceError, TraceReader, find_traces

__all__ = ["HandedOver", "is_inside"]

_CHUNK = 2**18  # bytes
_LEVEL = 4  # of gzip: a seventh smaller than 3, and faster than 6
_GZIP = 31  # zlib's number for it


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a file lies in a folder in truth, wherever links lead."""
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError):  # gone, or links in a circle
        return False


class HandedOver:
    """The bytes of a trace, piece by piece.

    Files that lie outside of the run, at the end of a link, are none of it.

    Raises:
        FileNotFoundError: There is no trace.
    """

    def __init__(self, run: Path) -> None:
        root = run if run.is_dir() else run.parent
        self._files = [path for path in find_traces(run) if is_inside(path, root)]
        if not self._files:
            raise FileNotFoundError(f"no trace in {str(run)!r}: what is there lies elsewhere")
        self.name = f"{run.absolute().name}.json.gz"
        self.size: int | None = None
        """In bytes, where it is known before all has been read."""
        self._descriptor: int | None = None
        if len(self._files) == 1:
            self._open(self._files[0])

    def _open(self, path: Path) -> None:
        self._descriptor = os.open(path.resolve(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise FileNotFoundError(f"no trace: {str(path)!r} is no file")
        self.name, self.size = path.name, found.st_size

    def __iter__(self) -> Iterator[bytes]:
        return self._joined() if self._descriptor is None else self._as_it_is(self._descriptor)

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
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

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
