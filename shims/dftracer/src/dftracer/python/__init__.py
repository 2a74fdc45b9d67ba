"""``dftracer.python`` of DFTracer 2, for pipesight."""

from pipesight._shim_conflicts import refuse_beside

from .ai import *  # noqa: F403
from .ai import __all__ as _of_ai
from .dynamo import Dynamo, create_backend, dynamo
from .logger import *  # noqa: F403
from .logger import __all__ as _of_logger

__all__ = ["Dynamo", "__version__", *_of_ai, *_of_logger, "create_backend", "dynamo"]

refuse_beside(__file__, "pipesight-dftracer", "dftracer", "pydftracer")
__version__ = "2.0.6+pipesight"
