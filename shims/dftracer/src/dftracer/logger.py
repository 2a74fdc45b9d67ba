"""``dftracer.logger`` of DFTracer 1, for pipesight."""

from pipesight.trace import ai
from pipesight.trace.dftracer import DFTRACER_ENABLE, DFTRACER_LOG_LEVEL, dft_fn, dftracer

from .python.env import DFTRACER_ENABLE_ENV, DFTRACER_LOG_LEVEL_ENV

__all__ = [
    "DFTRACER_ENABLE",
    "DFTRACER_ENABLE_ENV",
    "DFTRACER_LOG_LEVEL",
    "DFTRACER_LOG_LEVEL_ENV",
    "ai",
    "dft_fn",
    "dftracer",
]
