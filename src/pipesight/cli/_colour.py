"""Whether what a command prints is in colour."""

from __future__ import annotations

import os
import sys

__all__ = ["in_colour"]


def in_colour() -> bool:
    """Return whether stdout takes colours: terminals do, unless ``NO_COLOR`` is set; others if ``FORCE_COLOR`` is."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
