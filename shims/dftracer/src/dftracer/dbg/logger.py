"""``dftracer.dbg.logger`` of DFTracer 1, for pipesight."""

from dftracer.logger import *  # noqa: F403
from dftracer.logger import __all__ as __all__
