"""``dftracer.logger`` of DFTracer 1, for pipesight."""

from .python.ai import ai
from .python.logger import *  # noqa: F403
from .python.logger import __all__ as _names

__all__ = ["ai", *_names]
