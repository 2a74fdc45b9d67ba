"""``dftracer.python.logger`` of DFTracer 2, for pipesight."""

from pipesight.trace.dftracer import DFTRACER_ENABLE, DFTRACER_LOG_LEVEL, dft_fn, dftracer

from .env import DFTRACER_ENABLE_ENV, DFTRACER_LOG_LEVEL_ENV

__all__ = [
    "DFTRACER_ENABLE",
    "DFTRACER_ENABLE_ENV",
    "DFTRACER_LOG_LEVEL",
    "DFTRACER_LOG_LEVEL_ENV",
    "dft_fn",
    "dftracer",
]
