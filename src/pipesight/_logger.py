"""Loggers for the library's own lines: a failing handler does not stop the training.

An exception in a handler's ``emit`` reaches the line that logged. If that line is ours, it would break training.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import MutableMapping
from typing import Any

__all__ = ["OwnLogger", "own_logger"]

_failing = threading.Lock()


class OwnLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose handlers and filters may raise. The first error is shown on stderr."""

    _failed = False

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line; never raises."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # records name the caller, not this line
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception:
            with _failing:
                failed, self._failed = self._failed, True
            if not failed and logging.raiseExceptions:
                text = f"a handler of the logger {self.logger.name!r} failed, which is shown once; training continues\n"
                with contextlib.suppress(Exception):  # stderr may be closed, or None
                    sys.stderr.write(text + traceback.format_exc())

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Keep ``extra``, which `LoggerAdapter` would replace."""
        return msg, kwargs


def own_logger(name: str) -> OwnLogger:
    """Return what logs to ``logging.getLogger(name)`` and never raises."""
    return OwnLogger(logging.getLogger(name))
