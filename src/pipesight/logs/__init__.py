"""Log lines that say which partition and which layer is running."""

from pipesight.logs.layers import register_layer_logging_hooks
from pipesight.logs.records import ContextFilter
from pipesight.logs.tasks import TaskLog

__all__ = ["ContextFilter", "TaskLog", "register_layer_logging_hooks"]


def __dir__() -> list[str]:
    return __all__
