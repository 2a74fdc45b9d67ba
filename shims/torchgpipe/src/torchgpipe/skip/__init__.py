"""``torchgpipe.skip``, for pipesight."""

from .namespace import Namespace
from .skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
