"""``torchgpipe.gpipe``, for pipesight."""

from pipesight import GPipe
from pipesight.pipeline.partition import verify_sequential as verify_module

__all__ = ["GPipe", "verify_module"]
