"""Check the path that a public function was given."""

from __future__ import annotations

import os

__all__ = ["checked_path"]


def checked_path(path: object, what: str, fix: str) -> str:
    """Return the path as a string.

    Messages say ``what`` it is the path of, and with ``fix`` what to pass instead.

    Raises:
        TypeError: It is neither a string nor a `pathlib.Path`.
        ValueError: It is empty.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"the path of {what} must be a string or a pathlib.Path (path: {path!r}); {fix}")
    if not text:
        raise ValueError(f"the path of {what} must not be empty; {fix}")
    return text
