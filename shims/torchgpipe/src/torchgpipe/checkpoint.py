"""``torchgpipe.checkpoint``, for pipesight."""

from pipesight import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
