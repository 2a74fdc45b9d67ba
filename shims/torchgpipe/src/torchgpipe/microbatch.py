"""``torchgpipe.microbatch``, for pipesight: what is a micro-batch, and which one is running."""

from pipesight import current_microbatch
from pipesight.pipeline.microbatch import TensorOrTensors

__all__ = ["TensorOrTensors", "current_microbatch"]
