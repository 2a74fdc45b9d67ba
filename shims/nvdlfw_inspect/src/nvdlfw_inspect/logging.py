"""``nvdlfw_inspect.logging``, for pipesight."""

from pipesight.stats.extensions import MetricLogger, get_logger, print_rank_0, wrap_tensorboard_writer
from pipesight.stats.sinks import BaseLogger

__all__ = ["BaseLogger", "MetricLogger", "get_logger", "print_rank_0", "wrap_tensorboard_writer"]
