"""``dftracer.python.torch``, for pipesight: what ``torch.profiler`` has seen, as events of the trace."""

from .profiler import trace_handler

__all__ = ["trace_handler"]
