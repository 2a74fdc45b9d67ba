"""``dftracer.python.dbg.logger``, for pipesight."""

from dftracer.python.logger import (
    DFTRACER_ENABLE,
    DFTRACER_ENABLE_ENV,
    DFTRACER_LOG_LEVEL,
    DFTRACER_LOG_LEVEL_ENV,
    dft_fn,
    dftracer,
)

__all__ = [
    "DFTRACER_ENABLE",
    "DFTRACER_ENABLE_ENV",
    "DFTRACER_LOG_LEVEL",
    "DFTRACER_LOG_LEVEL_ENV",
    "dft_fn",
    "dftracer",
]
