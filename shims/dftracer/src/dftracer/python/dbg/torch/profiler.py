"""``dftracer.python.dbg.torch.profiler``, for pipesight."""

from dftracer.python.torch.profiler import trace_handler

__all__ = ["trace_handler"]
