"""Files of whole lines, and the time as log lines show it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipesight.stats.sinks.record import Name

__all__ = ["Clock", "LineFile", "Lines"]

MOST_NAMES = 100_000  # of lines, that are kept ready: some programs make up new ones in each step
_STEP = 1 << 16


class LineFile:
    """Lines that are added to a file, each batch at once and unbuffered, so that readers see it.

    A folder or a file that is missing, or was removed meanwhile, is made. A batch that does not fit on the disk leaves
    nothing of itself behind, and the next one is tried again.
    """

    def __init__(self, path: Path, *, overwrite: bool = True) -> None:
        self.path = path
        self.closed = False
        self._overwrite = overwrite
        self._file = -1

    def open(self) -> None:
        """Open the file, and make its folder; ``OSError`` where that is not possible."""
        if self._file >= 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mode = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self.path, mode | (os.O_TRUNC if self._overwrite else 0), 0o666)
        if not self._overwrite:
            _cut_half_line(self._file)
        self._overwrite = False  # should it be opened again

    def write(self, lines: bytes) -> None:
        """Add whole lines, all or none of them.

        Raises:
            OSError: they could not be written.
            ValueError: the file is closed.
        """
        if self.closed:
            raise ValueError(f"the file is closed ({str(self.path)!r})")
        written = 0
        try:
            if self._file >= 0 and not os.fstat(self._file).st_nlink:  # it was removed: nobody could read the lines
                self._release()
            self.open()
            while written < len(lines):
                written += os.write(self._file, lines[written:])
        except OSError:
            with contextlib.suppress(OSError):
                if written:
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            with contextlib.suppress(OSError):
                self._release()  # to be opened again, should this one be stale
            raise

    def close(self) -> None:
        """Close the file; it is not written to again."""
        self.closed = True
        self._release()

    def _release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _cut_half_line(file: int) -> None:
    """Remove what a killed process left of its last line."""
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _STEP)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)


class Lines:
    r"""The lines of many names, into which the values of an iteration are put all at once.

    Args:
        line: Returns the line of a name, without its value: ``%s`` stands there. ``\\0`` and ``\\1`` stand for what all
            lines have.
    """

    def __init__(self, line: Callable[[Name], str]) -> None:
        self._line = line
        self._ready: dict[tuple[Name, ...], str] = {}
        self._count = 0

    def filled(self, names: Sequence[Name], values: Sequence[object], *everywhere: str) -> str:
        """Return the lines of names, with their values, and with what all of them have."""
        text = self._ready.get(key := tuple(names))
        if text is None:
            if self._count > MOST_NAMES:
                self._ready.clear()
                self._count = 0
            self._count += len(key)
            text = self._ready[key] = "".join(map(self._line, key))
        for mark, what in zip("\0\1", everywhere, strict=False):
            text = text.replace(mark, what)
        return text % tuple(values)


class Clock:
    """Writes times, and works out the date and the seconds once a second only."""

    def __init__(self, form: str = "%Y-%m-%d %H:%M:%S") -> None:
        self._form = form
        self._second: tuple[int, str] = (-1, "")

    def now(self) -> str:
        """Return the time, as in ``2026-01-31 12:00:00,000``."""
        second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        return f"{self.written(second)},{nanoseconds // 1_000_000:03d}"

    def written(self, second: int) -> str:
        """Return a time in whole seconds."""
        known, text = self._second
        if second != known:
            text = time.strftime(self._form, time.localtime(second))
            self._second = (second, text)
        return text
