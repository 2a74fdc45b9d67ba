"""``dftracer.python.dbg.logger``, for pipesight."""

from dftracer.python.logger import *  # noqa: F403
from dftracer.python.logger import __all__ as __all__
