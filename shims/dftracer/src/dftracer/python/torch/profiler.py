"""``dftracer.python.torch.profiler``, for pipesight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight.trace.dftracer import dftracer

if TYPE_CHECKING:
    from torch.profiler import profile

__all__ = ["trace_handler"]


def trace_handler(profiler: profile) -> None:
    """Write the events of a profiler to the trace, in the category ``PP``.

    Example::

        with torch.profiler.profile(on_trace_ready=trace_handler) as profiler:
            train_step()

    Their times are on the trace's clock, so that they lie below the spans that were open.
    """
    log = dftracer.get_instance()
    finished = profiler.profiler
    begun = finished.kineto_results.trace_start_ns() // 1000 if finished and finished.kineto_results else 0
    for event in profiler.events() or ():
        log.log_event(
            event.key,
            "PP",
            begun + int(event.time_range.start),
            int(event.time_range.elapsed_us()),
            int_args={
                "device": int(getattr(event.device_type, "value", event.device_type)),
                "cpu_memory": event.cpu_memory_usage,
                "is_remote": int(event.is_remote),
                "device_memory_usage": event.device_memory_usage,
                "input_size": sum(len(shape) for shape in event.input_shapes or ()),
            },
            float_args={
                "total_cpu_percent": event.total_cpu_percent,
                "total_device_percent": event.total_device_percent,
            },
        )
