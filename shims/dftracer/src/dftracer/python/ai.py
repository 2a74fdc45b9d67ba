"""``dftracer.python.ai``, for pipesight: the tree, with what DFTracer 2.2 has beyond the guide."""

from pipesight.trace import ai

from .ai_classes import add_category, add_io
from .ai_common import *  # noqa: F403
from .ai_common import __all__ as _names

__all__ = [
    *_names,
    "ai",
    "checkpoint",
    "comm",
    "compute",
    "data",
    "dataloader",
    "device",
    "other",
    "pipeline",
]

if not hasattr(ai, "other"):  # this module may be loaded again
    add_io(ai.data)
    add_io(ai.checkpoint)
    add_category(ai, "other")

checkpoint = ai.checkpoint
comm = ai.comm
compute = ai.compute
data = ai.data
dataloader = ai.dataloader
device = ai.device
other = ai.other
pipeline = ai.pipeline
