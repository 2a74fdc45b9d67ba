"""Capture the log lines of a run, with their place in the pipeline.

    2026-11-15T10:00:00.123456 INFO train.model [step 3 partition 1 micro-batch 0 forward layer 2] message

What the program prints does not change: no handler is added, since `logging.basicConfig` does nothing once there is
one, and no level is set, since other handlers would then print more. Instead, loggers pass lines of our level up to the
point where handlers are called, and beyond it only lines that they would have passed anyway. A program that asks a
logger for its level gets the usual answer.

The one exception are the lines of tasks, which are in the file anyway: a program that logs at INFO would print one for
each task. They are printed only if the program asks for them by name, with a level or handler of their logger or of
``pipesight``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipesight import context
from pipesight._whole_file import whole_file
from pipesight.context import Observer, Where
from pipesight.logs.context_filter import logger as task_logger
from pipesight.logs.task_lines import MESSAGE
from pipesight.stats.sinks.line_file import Clock, LineFile

__all__ = ["LogCapture"]

_CALLERS = 4  # frames from a logger's `_log` to its handlers, subclasses included


class LogCapture:
    """Writes the lines of all loggers from a level on to a file, until `remove`.

    If the file gets larger than ``max_bytes``, its older half is removed. ``step`` returns the current step, for lines
    from outside pipelines.
    """

    def __init__(self, path: Path, *, level: int, max_bytes: int | None, step: Callable[[], int | None]) -> None:
        self.path, self.left_out = path, 0
        self._level, self._max_bytes, self._step = level, max_bytes, step
        self._file = LineFile(path)
        self._file.open()
        self._size = 0
        self._held: deque[bytes] = deque()
        self._process = os.getpid()
        self._writing = threading.RLock()
        self._formatter = logging.Formatter()
        self._clock = Clock("%Y-%m-%dT%H:%M:%S")
        self._enabled = logging.Logger.isEnabledFor
        self._call = logging.Logger.callHandlers
        self._tasks = _TaskLines(self)
        self._attach()

    @property
    def tasks(self) -> bool:
        """Whether to write a line for each task of a pipeline."""
        return self._tasks.on

    @tasks.setter
    def tasks(self, on: bool) -> None:
        self._tasks.on = on and self._level <= logging.INFO

    def has_task_lines(self) -> bool:
        """Return whether the program itself logs the lines of tasks."""
        return self._enabled(task_logger, logging.INFO) and _asks_for_tasks()

    def write(self, level: int, name: str, message: str, *, created: float | None = None, place: str = "") -> None:
        """Write a message of one or more lines; if that fails, training goes on."""
        self.hold(level, name, message, created=created, place=place)
        self.write_held()

    def hold(self, level: int, name: str, message: str, *, created: float | None = None, place: str = "") -> None:
        """Keep a line until `write_held`: writing releases the GIL, and workers would have to wait for it."""
        moment = time.time() if created is None else created
        text = message.replace("\n", "\n    ")
        label = f" [{place}]" if place else ""
        second = int(moment)
        written = f"{self._clock.written(second)}.{int((moment - second) * 1e6):06}"
        line = f"{written} {logging.getLevelName(level)} {name}{label} {text}\n"
        self._held.append(line.encode(errors="backslashreplace"))

    def write_held(self) -> None:
        """Write the lines that are kept."""
        with self._writing:
            held = [self._held.popleft() for _ in range(len(self._held))]
            if os.getpid() != self._process:  # a fork: all lines but the last are the parent's
                self._process, held = os.getpid(), held[-1:]
            try:
                self._file.write(b"".join(held))
                self._size += sum(map(len, held))
                if self._max_bytes is not None and self._size > self._max_bytes:
                    self._remove_older_half()
            except (OSError, ValueError):
                self.left_out += len(held)

    def remove(self) -> None:
        """Stop, and restore the loggers."""
        context.detach(self._tasks)
        if logging.Logger.isEnabledFor is self._our_enabled:
            logging.Logger.isEnabledFor = self._enabled  # type: ignore[method-assign]
        if logging.Logger.callHandlers is self._our_call:
            logging.Logger.callHandlers = self._call  # type: ignore[method-assign]
        self._level = sys.maxsize  # in case others have wrapped our functions
        self._file.close()

    def _attach(self) -> None:
        enabled, call = self._enabled, self._call

        def is_enabled_for(logger: logging.Logger, level: int) -> bool:
            if enabled(logger, level):
                return logger is not task_logger or level != logging.INFO or _asks_for_tasks()
            if level < self._level or logger is task_logger or logger.disabled or logger.manager.disable >= level:
                return False
            asking = sys._getframe(1)
            if asking.f_code is _OF_ADAPTER and asking.f_back is not None:
                asking = asking.f_back
            return asking.f_code in _LOGGING

        def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.levelno >= self._level:
                with contextlib.suppress(Exception):  # whatever a record holds
                    self._emit(record)
            if not _was_logged() or enabled(logger, record.levelno):
                call(logger, record)

        self._our_enabled, self._our_call = is_enabled_for, call_handlers
        context.attach(self._tasks)
        logging.Logger.isEnabledFor = is_enabled_for  # type: ignore[method-assign,assignment]
        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign,assignment]

    def _emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            message = f"{message}\n{self._formatter.formatException(record.exc_info)}"
        if record.stack_info:
            message = f"{message}\n{self._formatter.formatStack(record.stack_info)}"
        self.write(record.levelno, record.name, message, created=record.created, place=self._place(record))

    def _place(self, record: logging.LogRecord) -> str:
        """Return the place in the pipeline that a record names, or else that of this thread."""
        where: Any = context.current()
        found = record.__dict__
        if where is None and found.get("partition") is None:
            step = found.get("step", self._step())
            return "" if step is None else f"step {step}"
        step, partition, microbatch, phase, layer = (
            found.get(name, getattr(where, name, None))
            for name in ("step", "partition", "microbatch", "phase", "layer")
        )
        words = [f"step {step}", f"partition {partition}", f"micro-batch {microbatch}", str(phase)]
        return " ".join(words if layer is None else [*words, f"layer {layer}"])

    def _remove_older_half(self) -> None:
        """Remove the older half of the lines."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        size, kept = 0, len(lines)
        assert self._max_bytes is not None
        while kept and size + len(lines[kept - 1]) <= self._max_bytes // 2:
            kept -= 1
            size += len(lines[kept])
        while kept < len(lines) and lines[kept].startswith(b"    "):  # continues a line that is removed
            size -= len(lines[kept])
            kept += 1
        with whole_file(self.path) as file:
            file.write(b"".join(lines[kept:]))
        self.left_out += sum(not line.startswith(b"    ") for line in lines[:kept])
        self._size = size


class _TaskLines(Observer):
    """Writes the lines that `pipesight.logs.TaskLog` would log, at a third of the cost."""

    def __init__(self, lines: LogCapture) -> None:
        self._lines, self.on = lines, False

    def wanted(self) -> bool:
        """Return whether the lines are wanted, and the program does not log them itself."""
        return self.on and not self._lines.has_task_lines()

    def task_started(self, where: Where) -> None:
        """Write the line of a forward task."""
        if where.phase == "forward":
            message = MESSAGE % (where.microbatch, where.partition, where.checkpoint_stop, where.checkpointing)
            place = f"step {where.step} partition {where.partition} micro-batch {where.microbatch} forward"
            self._lines.hold(logging.INFO, task_logger.name, message, place=place)

    def pass_ended(self) -> None:
        """Write the lines of the pass, in the thread that waits for it."""
        self._lines.write_held()


def _asks_for_tasks() -> bool:
    """Return whether the program has set up the logger of task lines itself, or that of all of pipesight."""
    known = (task_logger, logging.getLogger("pipesight"))
    return any(one.level or not all(isinstance(own, logging.NullHandler) for own in one.handlers) for one in known)


def _was_logged() -> bool:
    """Return whether the record was logged with a level check; `Logger.handle` passes records on without one."""
    frame = sys._getframe(2)
    for _ in range(_CALLERS):
        if frame.f_code is _LOG:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


_LOG = logging.Logger._log.__code__
_NAMES = ("debug", "info", "warning", "error", "critical", "log")
_LOGGING = {getattr(kind, name).__code__ for kind in (logging.Logger, logging.LoggerAdapter) for name in _NAMES}
_OF_ADAPTER = logging.LoggerAdapter.isEnabledFor.__code__
