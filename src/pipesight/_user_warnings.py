"""Warnings that name the line of the user's program, however deep inside of the library they are given."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither the library's nor PyTorch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_inside(module: object) -> bool:
    return str(module).partition(".")[0] in ("pipesight", "torch")
