"""Log lines that name the partition, micro-batch and layer that is running."""

from pipesight.logs.context_filter import ContextFilter
from pipesight.logs.layer_lines import register_layer_logging_hooks
from pipesight.logs.task_lines import TaskLog

__all__ = ["ContextFilter", "TaskLog", "register_layer_logging_hooks"]


def __dir__() -> list[str]:
    return __all__
