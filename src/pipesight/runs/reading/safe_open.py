"""Open files of a run safely, and only here: plain files inside the run, and nothing else.

A run may come from anyone. A pipe would make its reader wait forever, opening a device may do worse, and a link may
point to any file of the user who reads the run::

    refusal(path, run)     why a file must not be read; `None` if it may
    open_plain(path)       open a plain file, and never block
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["RefusedError", "check_plain", "open_plain", "read_json_object", "refusal", "without_refused"]

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class RefusedError(OSError):
    """Something in the place of a file is not a plain file."""


def refusal(path: Path, run: Path) -> str | None:
    """Return why a file of a run must not be read; ``None`` if it is a plain file, or does not exist.

    Links are followed if they end in the ``run``; if that is one file, in its folder.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return f"refused: it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file"
        if not path.resolve(strict=True).is_relative_to(run.resolve(strict=True)):
            return "refused: it is a link to a file outside the run"
    except FileNotFoundError:
        return "refused: it is a broken link" if path.is_symlink() else None
    except (OSError, RuntimeError, ValueError) as error:  # circular links, unreadable folders
        return f"refused: {getattr(error, 'strerror', None) or error}"
    return None


def without_refused(paths: Iterable[Path], run: Path, refuse: Callable[[Path, str], None] | None = None) -> list[Path]:
    """Return the paths that may be read; ``refuse`` takes the others, and why."""
    kept = []
    for path in paths:
        if (why := refusal(path, run)) is None:
            kept.append(path)
        elif refuse is not None:
            refuse(path, why)
    return kept


def check_plain(path: Path, run: Path) -> None:
    """Raise `RefusedError` if a file is not a plain one, or is outside the run."""
    if (why := refusal(path, run)) is not None:
        raise RefusedError(errno.EINVAL, why, str(path))


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading; nothing else is ever opened, but raises `RefusedError`."""
    _check_mode(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)  # it may have been replaced
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ``ValueError`` if there is none."""
    try:
        with open_plain(path) as file:
            value = json.loads(file.read())
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _check_mode(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise RefusedError(errno.EINVAL, f"refused: it is {what}, not a file", str(path))
