"""Whether files are intact: their checksums and their last lines.

DuckDB does not verify checksums. Small files, as most are, are checked before they are read, so that nothing damaged is
read. Large ones are checked in the background while the report is made, which then ends with what was found.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pipesight.runs.reading._decompression import Decompressor

__all__ = ["IntegrityChecks"]

_SMALL = 2**22  # bytes of all files together
_NICENESS = 5  # low enough for queries to come first, high enough not to starve on a busy machine


class IntegrityChecks:
    """Checks files now, or in a thread."""

    def __init__(self) -> None:
        self._done: dict[Path, Decompressor] = {}
        self._waiting: list[tuple[Path, Callable[[Decompressor], None]]] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def check_small(self, paths: Sequence[Path]) -> None:
        """Check files now, if they are small."""
        if sum(_size(path) for path in paths) <= _SMALL:
            self._check(paths)

    def has_found_damage(self, path: Path, *, check: bool = False) -> bool:
        """Return whether a file is known to be damaged, or to hold what DuckDB rejects; ``check`` checks it first."""
        if check and path not in self._done:
            self._check([path])
        found = self._done.get(path)
        return found is not None and (found.cut or found.damaged > 0 or found.has_surrogates)

    def when_done(self, path: Path, tell: Callable[[Decompressor], None]) -> None:
        """Call ``tell`` with the result for a file, now or in `finish`."""
        if path in self._done:
            tell(self._done[path])
        else:
            self._waiting.append((path, tell))

    def begin(self) -> None:
        """Check the remaining files in a thread."""
        if self._waiting:
            paths = [path for path, _ in self._waiting]
            self._thread = threading.Thread(target=self._check_nicely, args=[paths], daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait for all checks, and report their results."""
        if self._thread is not None:
            self._thread.join()
        waiting, self._waiting = self._waiting, []
        for path, tell in waiting:
            if path in self._done:
                tell(self._done[path])

    def stop(self) -> None:
        """Abandon the remaining checks."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _check_nicely(self, paths: Sequence[Path]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux has a niceness for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._check(paths)

    def _check(self, paths: Sequence[Path]) -> None:
        for path in paths:
            unpacker = Decompressor(path)
            with contextlib.suppress(OSError):  # whoever reads the file reports it
                for _ in unpacker:
                    if self._stopped.is_set():
                        return
            self._done[path] = unpacker


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
