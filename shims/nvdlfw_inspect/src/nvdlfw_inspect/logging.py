"""``nvdlfw_inspect.logging``: loggers of statistics, and the message log."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from pipesight.stats.current_session import running, running_or_none
from pipesight.stats.log_settings import process_rank
from pipesight.stats.sinks import BaseLogger, FileSink, LoggerSink, Record, ScalarWriter, Sinks, TensorBoardSink
from pipesight.stats.stats_session import StatsSession

__all__ = [
    "BaseLogger",
    "FileLogger",
    "LoggersSink",
    "MetricLogger",
    "TensorboardLogger",
    "custom_assert",
    "get_logger",
    "print_rank_0",
    "wrap_tensorboard_writer",
]


class MetricLogger:
    """Logs scalars to every enabled logger, with a session or without one.

    Attributes:
        enabled_loggers: Who gets the statistics; the session's file is one of them. `end_debug` empties it.
    """

    enabled_loggers: ClassVar[list[BaseLogger]] = []

    @staticmethod
    def log_scalar(name: str, value: Any, iteration: int, **kwargs: Any) -> None:
        """Log a number or a tensor of one element; enabled loggers of the user's get ``kwargs``, too."""
        scalar = _Scalar(name, "", "", operator.index(iteration), _plain(value))
        scalar.kwargs = kwargs
        session = running_or_none()
        (LoggersSink() if session is None else session.sinks).write([scalar])

    @staticmethod
    def add_logger(_logger: BaseLogger) -> None:
        """Log to another logger too."""
        LoggerSink(_logger)  # checks it
        MetricLogger.enabled_loggers.append(_logger)


class _Scalar(Record):
    """A scalar, and what its caller passes to loggers beside it."""

    kwargs: Mapping[str, Any] = MappingProxyType({})


class LoggersSink:
    """The sink of a session that hands values to the enabled loggers."""

    def write(self, records: Sequence[Record]) -> None:
        """Log a scalar for each record; the session has a sink for its file."""
        loggers = [logger for logger in MetricLogger.enabled_loggers if not isinstance(logger, FileLogger)]
        kwargs = records[0].kwargs if isinstance(records[0], _Scalar) else {}  # a scalar comes alone
        Sinks(LoggerSink(logger, arguments=kwargs) for logger in loggers).write(records)

    def close(self) -> None:
        """Forget the loggers, now that they have the last values. They are the user's, and stay open."""
        MetricLogger.enabled_loggers.clear()


class FileLogger(BaseLogger):
    """The files of a session: messages, and statistics if it writes them to a file.

    Attributes:
        root_log_dir: The folder of the session.
    """

    def __init__(self, session: StatsSession) -> None:
        self._session = session
        self.root_log_dir = session.messages.root_log_dir

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileLogger) and other._session is self._session

    def __hash__(self) -> int:
        return hash(self._session)

    def log_message(self, message: object, level: int = logging.INFO) -> None:
        """Write a line to the message log, each time."""
        self._session.messages.log_message(message, level)

    def log_scalar(self, name: str, value: Any, iteration: int, **kwargs: Any) -> None:
        """Write a line to the file of statistics."""
        self._session.sinks.only(FileSink).write([Record.named(name, _plain(value), iteration)])


def get_logger() -> FileLogger:
    """Return the files of the session; ``get_logger().log_message("text", level=logging.WARNING)`` writes to one."""
    return FileLogger(running())


class TensorboardLogger(BaseLogger):
    """A TensorBoard writer as a logger."""

    def __init__(self, tb_writer: ScalarWriter) -> None:
        self._sinks = Sinks([TensorBoardSink(tb_writer)])

    def log_scalar(self, name: str, value: Any, iteration: int, **kwargs: Any) -> None:
        """Add the scalar to the writer; a full disk is reported once, and does not stop the training."""
        self._sinks.write([Record.named(name, _plain(value), int(iteration))])


def wrap_tensorboard_writer(tb_writer: ScalarWriter) -> BaseLogger:
    """Return a logger that logs to a TensorBoard writer."""
    return TensorboardLogger(tb_writer)


def custom_assert(condition: object, message: str, level: int = logging.ERROR) -> None:
    """Write the message to the message log and raise ``AssertionError``, unless the condition holds."""
    if not condition:
        session = running_or_none()
        if session is not None:
            session.messages.log_message(message, level)
        raise AssertionError(message)


def print_rank_0(*message: object) -> None:
    """Print, on the first rank only."""
    if process_rank() == 0:
        print(*message, flush=True)


def _plain(value: Any) -> float:
    """Return a number as a float, a tensor's without its history."""
    return float(value.detach() if hasattr(value, "detach") else value)
