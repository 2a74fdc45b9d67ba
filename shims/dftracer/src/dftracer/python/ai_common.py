"""``dftracer.python.ai_common``, for pipesight: the names of the conventions as constants, and classes of nodes."""

from .ai_classes import *  # noqa: F403
from .ai_classes import __all__ as _classes
from .ai_names import *  # noqa: F403
from .ai_names import __all__ as _names

__all__ = [*[name for name in _classes if not name.startswith("add_")], *_names]
