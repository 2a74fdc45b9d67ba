"""``torchgpipe.batchnorm``, for pipesight."""

from pipesight.pipeline.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
