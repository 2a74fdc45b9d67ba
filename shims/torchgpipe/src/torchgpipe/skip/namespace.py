"""``torchgpipe.skip.namespace``, for pipesight."""

from pipesight.skip import Namespace

__all__ = ["Namespace"]
