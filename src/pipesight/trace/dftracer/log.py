"""The trace of a process, as programs written for DFTracer handle it: `dftracer`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, ClassVar, Literal

from pipesight._logger import own_logger
from pipesight.trace import _span_events, trace_session
from pipesight.trace._args import plain, plain_args
from pipesight.trace._file_names import is_device
from pipesight.trace._recording_switch import is_recording
from pipesight.trace._span_events import EVENTS, METADATA, begin, begin_silently, remove
from pipesight.trace._tracer import tracer
from pipesight.trace.environment_settings import Settings

__all__ = ["DFTRACER_ENABLE", "DFTRACER_LOG_LEVEL", "dftracer"]

logger = own_logger(__name__)

DFTRACER_ENABLE = bool(Settings.from_environment().enable)
"""Whether the environment lets `dftracer.initialize_log` begin a trace; of the moment of this import."""

DFTRACER_LOG_LEVEL = Settings.from_environment().log_level
"""The level of the logger ``pipesight.trace`` that the environment asks for."""

_DEFAULT_FILE = Path("trace.pfw")


class dftracer:  # noqa: N801
    """The trace of this process, as DFTracer's programs handle it.

    Example::

        log = dftracer.initialize_log("run/trace.pfw", None, -1)
        train()
        log.finalize()
    """

    _instance: ClassVar[dftracer | None] = None

    def __init__(self) -> None:
        self._session: trace_session.Session | None = None

    @classmethod
    def get_instance(cls) -> dftracer:
        """Return the one instance."""
        if dftracer._instance is None:
            dftracer._instance = dftracer()
        return dftracer._instance

    @staticmethod
    def initialize_log(
        logfile: str | os.PathLike[str] | EllipsisType | None = None,
        data_dir: str | EllipsisType | None = None,
        process_id: int = -1,
    ) -> dftracer:
        """Begin to trace into ``logfile``, if the environment says ``DFTRACER_ENABLE=1``.

        A trace that is being written goes on, so that workers which run the program's first lines again write where
        they should. Only one that the environment asked for, or another process, gives way to another ``logfile``.

        Args:
            logfile: the file; else the one that ``DFTRACER_LOG_FILE`` names, or ``trace.pfw``.
            data_dir: taken for the sake of old programs. Calls of the operating system are not traced.
            process_id: goes into the name of the file, unless it is negative. Pass it where processes that torchrun
                did not start share a ``logfile``.
        """
        instance = dftracer.get_instance()
        settings = Settings.from_environment()
        settings.set_log_level()
        if settings.enable:
            asked = None if logfile is None or isinstance(logfile, EllipsisType) else _numbered(logfile, process_id)
            instance._begin(asked, settings, process_id)
        else:
            logger.info("not tracing: DFTRACER_ENABLE is not 1")
        return instance

    def _begin(self, asked: Path | None, settings: Settings, process_id: int) -> None:
        running = trace_session.running()
        if running is not None:
            from_outside = running.from_environment or _is_forked()
            if asked is None or _same(asked, settings.log_file):
                if from_outside:
                    self._session = running
                    running.keep_if_empty()
                return
            if not from_outside:
                logger.warning("already tracing into %s; ignoring %s", running.path, asked)
                return
            running.stop()
        self._session = trace_session.start(
            asked or _numbered(settings.log_file or _DEFAULT_FILE, process_id),
            compress=settings.trace_compression,
            include_args=settings.inc_metadata,
            track_labels=settings.track_labels,
            interval=settings.interval,
            max_bytes=settings.max_bytes,
            max_parts=settings.max_parts,
        )
        self._session.keep_if_empty()
        logger.info("tracing into %s", self._session.path)

    def finalize(self) -> None:
        """Write what is left, and end the trace that `initialize_log` began or took over."""
        if self._session is None:
            trace_session.flush()
        else:
            self._session.stop()
            self._session = None

    def get_time(self) -> int:
        """Return the time of the trace, in microseconds."""
        return tracer.encoder.microseconds(_span_events.now())

    # Events by hand.

    def enter_event(self) -> None:
        """Begin an event that `log_event` describes and `exit_event` leaves; what begins in between is nested in it."""
        if is_recording():
            begin(_Entered())
        else:
            begin_silently(_Entered(logged=True))

    def exit_event(self) -> None:
        """Leave what the last `enter_event` began."""
        span = _span_events.innermost(lambda node: isinstance(node, _Entered))
        if span is not None:
            remove(span)

    def log_event(
        self,
        name: str,
        cat: str,
        start_time: int,
        duration: int,
        int_args: Mapping[str, Any] | None = None,
        float_args: Mapping[str, Any] | None = None,
        string_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an event of which the times are known, in microseconds as `get_time` gives them."""
        if not is_recording():
            return
        tagged = {**(int_args or {}), **(float_args or {}), **(string_args or {})}
        args = plain_args({key: _untagged(value) for key, value in tagged.items()})
        event = _event(str(name), str(cat))
        start = int(start_time) * 1000 - tracer.encoder.offset
        stop = start + int(duration) * 1000
        span = _span_events.current()
        if isinstance(span[0], _Entered) and not span[0].logged:
            span[0].logged = True
            EVENTS.extend((event, span[1], span[2][1], start, stop, span[4], span[5], args))
            if not len(EVENTS) & _span_events.BACKLOG_MASK:
                _span_events.check_backlog()
        else:
            _span_events.past(event, start, stop, args)

    def log_metadata_event(self, key: str, value: object) -> None:
        """Note a fact about this run."""
        if is_recording():
            _span_events.put(METADATA, {"name": str(plain(key)), "value": str(plain(value))})

    set_app_metadata_int = set_app_metadata_string = log_metadata_event


@dataclass(eq=False, slots=True)
class _Entered:
    """What `dftracer.enter_event` opens."""

    logged: bool = False


@dataclass(frozen=True, eq=False)
class _Event:
    """The event of a `dftracer.log_event`."""

    name: str
    category: str
    phase: ClassVar[Literal["X"]] = "X"


_event = functools.lru_cache(maxsize=4096)(_Event)


def _untagged(value: Any) -> Any:
    """Return what DFTracer 2 gives as a pair: how to index it, and the value."""
    return value[1] if isinstance(value, tuple) and len(value) == 2 else value


def _numbered(file: str | os.PathLike[str], process_id: int) -> Path:
    path = Path(file)
    return path if process_id < 0 or is_device(path) else path.with_name(f"{_stem(path)}-{process_id}.pfw")


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".pfw")


def _same(asked: Path, other: Path | None) -> bool:
    if other is None:
        return False
    return (asked.absolute().parent, _stem(asked)) == (other.absolute().parent, _stem(other))


def _is_forked() -> bool:
    """Tell whether the trace of this process is that of another, which this one was forked from."""
    return os.environ.get("PIPESIGHT_PARENT") != str(os.getpid())
