"""``torchgpipe.gpipe.GPipe``, for pipesight."""

from pipesight import GPipe

__all__ = ["GPipe"]
