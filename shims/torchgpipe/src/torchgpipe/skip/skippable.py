"""``torchgpipe.skip.skippable``, for pipesight."""

from pipesight.skip import pop, skippable, stash, verify_skippables

__all__ = ["pop", "skippable", "stash", "verify_skippables"]
