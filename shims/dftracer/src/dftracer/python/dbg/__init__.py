"""``dftracer.python.dbg``, the debug build, for pipesight: there is one build, and this is it."""

from dftracer.python import *  # noqa: F403
from dftracer.python import __all__ as _all

__all__ = [name for name in _all if name != "__version__"]
