"""``dftracer.python.dbg.ai``, for pipesight."""

from dftracer.python.ai import *  # noqa: F403
from dftracer.python.ai import __all__ as __all__
