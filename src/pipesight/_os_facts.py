"""Facts from the operating system: how many processors this process may use, and its current folder."""

from __future__ import annotations

import os

__all__ = ["current_folder", "processors"]


def processors() -> int:
    """Return how many processors this process may run on, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def current_folder() -> str:
    """Return the current folder, or ``?`` if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return "?"
