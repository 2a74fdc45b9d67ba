"""DFTracer's own interface: ``dftracer``, which begins and ends a trace, and ``dft_fn``, which records events.

The shim ``pipesight-dftracer`` has these under DFTracer's import names. New code is better off with `pipesight.trace`.
"""

from pipesight.trace.dftracer.events import dft_fn
from pipesight.trace.dftracer.log import DFTRACER_ENABLE, DFTRACER_LOG_LEVEL, dftracer

__all__ = ["DFTRACER_ENABLE", "DFTRACER_LOG_LEVEL", "dft_fn", "dftracer"]
