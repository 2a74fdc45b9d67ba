"""``dftracer.python.logger`` of DFTracer 2, for pipesight."""

from pipesight.trace.dftracer import dft_fn, dftracer

from .env import *  # noqa: F403
from .env import __all__ as _names

__all__ = [*_names, "dft_fn", "dftracer"]
