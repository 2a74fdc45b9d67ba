"""``dftracer.python.common``, for pipesight."""

from pipesight.trace.dftracer import dft_fn, dftracer

__all__ = ["dft_fn", "dftracer"]
