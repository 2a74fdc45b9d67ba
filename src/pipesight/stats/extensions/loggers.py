"""Logging for extensions: to the sinks and the general log of the session that is open."""

from __future__ import annotations

from typing import Any

from pipesight.stats.current_session import running
from pipesight.stats.log_settings import process_rank
from pipesight.stats.message_log import MessageLog
from pipesight.stats.sinks import BaseLogger, LoggerSink, Record, ScalarWriter, TensorBoardSink

__all__ = ["MetricLogger", "get_logger", "print_rank_0", "wrap_tensorboard_writer"]


class MetricLogger:
    """Logs scalars to every sink of the session."""

    @staticmethod
    def log_scalar(name: str, value: Any, iteration: int, **kwargs: Any) -> None:
        """Log a number or a tensor of one element."""
        running().sinks.write([Record.named(name, _plain(value), int(iteration))])

    @staticmethod
    def add_logger(logger: BaseLogger) -> None:
        """Log to another logger too, for as long as the session lasts."""
        running().sinks.add(LoggerSink(logger))


def get_logger() -> MessageLog:
    """Return the general log; ``get_logger().log_message("text", level=logging.WARNING)`` writes to it."""
    return running().messages


def print_rank_0(*message: object) -> None:
    """Print, on the first rank only."""
    if process_rank() == 0:
        print(*message, flush=True)


class _WriterLogger(BaseLogger):
    """A TensorBoard writer as a logger."""

    def __init__(self, tb_writer: ScalarWriter) -> None:
        self._sink = TensorBoardSink(tb_writer)

    def log_scalar(self, name: str, value: Any, iteration: int, **kwargs: Any) -> None:
        self._sink.write([Record.named(name, _plain(value), int(iteration))])


def wrap_tensorboard_writer(tb_writer: ScalarWriter) -> BaseLogger:
    """Return a logger that logs to a TensorBoard writer."""
    return _WriterLogger(tb_writer)


def _plain(value: Any) -> float:
    """Return a number as a float, a tensor's without its history."""
    return float(value.detach() if hasattr(value, "detach") else value)
