"""``dftracer.python.dbg.torch``, for pipesight."""

from dftracer.python.torch import trace_handler

__all__ = ["trace_handler"]
