"""Statistics for a logger that the user wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pipesight.stats.sinks.record import Record

__all__ = ["BaseLogger", "LoggerSink"]


class BaseLogger(ABC):
    """The base class of your own loggers, for ``initialize(statistics_logger=...)``.

    Example::

        class Prints(BaseLogger):
            def log_scalar(self, name, value, iteration, **kwargs):
                print(name, value, iteration)
    """

    @abstractmethod
    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        """Log one value; the name is ``layer_tensor_statistic``."""


class LoggerSink:
    """Calls ``logger.log_scalar(name, value, iteration, **kwargs)`` for each value. What that raises is raised.

    Args:
        logger: The user's.
        prefix: Goes before each name.
        arguments: More of them, for ``**kwargs``.
    """

    def __init__(self, logger: BaseLogger, *, prefix: str = "", arguments: Mapping[str, Any] | None = None) -> None:
        if not callable(getattr(logger, "log_scalar", None)) or isinstance(logger, type):
            kind = f"the class {logger.__name__}" if isinstance(logger, type) else type(logger).__name__
            raise TypeError(
                f"a statistics logger must have log_scalar(name, value, iteration) (statistics_logger: {kind}); "
                "pass an instance of a subclass of BaseLogger"
            )
        self._logger, self._prefix, self._arguments = logger, prefix, arguments or {}

    def write(self, records: Sequence[Record]) -> None:
        """Log a scalar for each record."""
        for record in records:
            self._logger.log_scalar(f"{self._prefix}{record.name}", record.value, record.iteration, **self._arguments)

    def close(self) -> None:
        """Do nothing: the logger is the user's."""
