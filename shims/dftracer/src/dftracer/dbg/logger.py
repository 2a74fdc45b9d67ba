"""``dftracer.dbg.logger`` of DFTracer 1, for pipesight."""

from dftracer.logger import (
    DFTRACER_ENABLE,
    DFTRACER_ENABLE_ENV,
    DFTRACER_LOG_LEVEL,
    DFTRACER_LOG_LEVEL_ENV,
    ai,
    dft_fn,
    dftracer,
)

__all__ = [
    "DFTRACER_ENABLE",
    "DFTRACER_ENABLE_ENV",
    "DFTRACER_LOG_LEVEL",
    "DFTRACER_LOG_LEVEL_ENV",
    "ai",
    "dft_fn",
    "dftracer",
]
