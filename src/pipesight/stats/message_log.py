"""The message log: what a statistics session has to say, and what users add with ``log_message``."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from pipesight.stats.log_settings import LogSettings, log_file, process_rank
from pipesight.stats.sinks.line_file import Clock, LineFile

__all__ = ["MessageLog", "with_prefix"]

P = ParamSpec("P")
R = TypeVar("R")

MOST_REMEMBERED = 100_000

_prefix: ContextVar[str] = ContextVar("prefix", default="pipesight")


def with_prefix(prefix: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``; message logs that it makes begin their lines on stderr with ``prefix``."""

    @functools.wraps(function)
    def prefixed(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _prefix.set(prefix)
        try:
            return function(*args, **kwargs)
        finally:
            _prefix.reset(token)

    return prefixed


class MessageLog:
    """Writes ``{log_dir}/nvdlfw_inspect_logs/nvdlfw_inspect[_TIMESTAMP]_globalrank-R.log``.

    Messages from WARNING up also go to stderr, after ``pipesight - ``. There is no handler and no named logger behind
    it: the program's logging configuration neither changes nor matters, and a closed log writes nothing. A recorded run
    has log lines of its own: given ``log``, messages and their levels go there, and there is no file.

    Example::

        log = MessageLog("logs")
        log.log_message("step 3 took long", logging.WARNING)
        log.close()
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        rank: int | None = None,
        settings: LogSettings | None = None,
        log: Callable[[int, str], None] | None = None,
    ) -> None:
        self.settings = LogSettings.from_environment() if settings is None else settings
        rank = process_rank() if rank is None else rank
        self.root_log_dir = os.fspath(log_dir)  # extensions put files of their own there
        self.path = log_file(log_dir, "nvdlfw_inspect_logs", rank=rank, settings=self.settings)
        self.lost = 0
        self._said: set[Hashable] = set()
        self._complained = False
        self._prefix = _prefix.get()
        self._log = log
        self._lines = LineFile(self.path, overwrite=self.settings.overwrite)
        self._clock = Clock()
        self._lock = threading.Lock()
        if log is None:
            try:
                self._lines.open()
            except OSError as error:
                self._complain(error)
        for mistake in self.settings.mistakes:
            self.warning(mistake)

    def log_message(self, message: object, level: int | str = logging.INFO) -> None:
        """Log a message, each time; below the level of the settings, or after `close`, do nothing."""
        number = _number(level)
        if number < self.settings.level or self._lines.closed:
            return
        line = f"{self._clock.now()} - {logging.getLevelName(number)} - {message}\n"
        if number >= logging.WARNING:
            self._to_stderr(line)
        if self._log is not None:
            self._log(number, str(message))
            return
        with self._lock:
            if self._lines.closed:
                return
            try:
                self._lines.write(line.encode(errors="backslashreplace"))
            except OSError as error:
                self.lost += 1
                self._complain(error)

    def is_first(self, message: Hashable) -> bool:
        """Return whether this was not asked about the message before, for what is to be logged once."""
        with self._lock:
            if message in self._said:
                return False
            if len(self._said) >= MOST_REMEMBERED:
                self._said.clear()
            self._said.add(message)
        return True

    def debug(self, message: object) -> None:
        """Log a message for debugging."""
        self.log_message(message, logging.DEBUG)

    def info(self, message: object) -> None:
        """Log what happened."""
        self.log_message(message, logging.INFO)

    def warning(self, message: object) -> None:
        """Log a warning, on stderr too."""
        self.log_message(message, logging.WARNING)

    def error(self, message: object) -> None:
        """Log a failure, on stderr too."""
        self.log_message(message, logging.ERROR)

    def close(self) -> None:
        """Close the file; nothing is written to it afterwards."""
        with self._lock:
            self._lines.close()

    def _complain(self, error: OSError) -> None:
        if self._complained:
            return
        self._complained = True
        self._to_stderr(f"{self._clock.now()} - WARNING - cannot write the log {str(self.path)!r}: {error}\n")

    def _to_stderr(self, line: str) -> None:
        with contextlib.suppress(Exception):  # no stderr, or a closed one, must not end the training
            sys.stderr.write(f"{self._prefix} - {line}")
            sys.stderr.flush()


def _number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    number = logging.getLevelNamesMapping().get(level.strip().upper())
    if number is None:
        raise ValueError(f"unknown log level (level: {level!r}); use logging.INFO or another of logging's levels")
    return number
