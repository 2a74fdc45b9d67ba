"""Tracing into a file: `start`, `stop`, and the processes that a traced one starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pipesight._logger import own_logger
from pipesight._path_argument import checked_path
from pipesight.trace._encode import Encoder
from pipesight.trace._inheritance import (
    handed_on,
    inherited,
    inherited_clock,
    read_again,
    set_environment,
    update_forkserver_children,
)
from pipesight.trace._tracer import tracer
from pipesight.trace._write_queue import TraceFile
from pipesight.trace.environment_settings import INTERVALS, MOST, Settings

__all__ = [
    "Session",
    "ending",
    "flush",
    "follow_environment",
    "on_finish",
    "running",
    "start",
    "start_if_asked",
    "stop",
]

logger = own_logger(__name__)


class Session:
    """A trace that is being written, from `start`. Leaving its ``with`` block, or `stop`, ends it.

    Attributes:
        from_environment: Whether ``PIPESIGHT_ENABLE`` or ``DFTRACER_ENABLE`` started it.
    """

    def __init__(self, file: TraceFile, *, from_environment: bool = False) -> None:
        self._file = file
        self.from_environment = from_environment
        self.of_command = False
        """Whether ``pipesight run`` started it: the program's own calls of `start` and `stop` are then ignored."""
        self.environment_before: dict[str, str | None] = {}
        """Variables that were set for child processes, and what they were before."""

    @property
    def path(self) -> Path:
        """The trace file of this process, created with the first event."""
        return self._file.files.path

    @property
    def lost(self) -> int:
        """How many events could not be written."""
        return self._file.lost

    @property
    def removed(self) -> int:
        """How many events were in parts that ``max_parts`` removed."""
        return self._file.files.removed

    @property
    def written(self) -> int:
        """How many events the existing files hold."""
        return self._file.files.written

    @property
    def clock_offset(self) -> int:
        """Nanoseconds added to the monotonic clock to get the times in the file."""
        return self._file.encoder.offset

    def pause(self) -> None:
        """Stop recording until `resume`; spans that are already open are still recorded."""
        tracer.pause()

    def resume(self) -> None:
        """Record again."""
        tracer.resume()

    def flush(self) -> None:
        """Write all events that have ended."""
        flush()

    def keep_if_empty(self) -> None:
        """Leave a file, with header and footer, even if there are no events."""
        self._file.keep_if_empty = True

    def stop(self) -> None:
        """Write the remaining events and close the file."""
        global _session
        if _session is self:
            _session = None
            set_environment(self.environment_before)
            update_forkserver_children()
        tracer.remove(self._file)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Guest(Session):
    """What `start` returns under ``pipesight run``, whose trace the program cannot pause or stop."""

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Write all events that have ended."""
        flush()


_session: Session | None = None


def running() -> Session | None:
    """Return the trace that is being written."""
    return _session


def start(
    path: str | os.PathLike[str],
    *,
    compress: bool = True,
    include_args: bool = True,
    track_labels: bool = True,
    interval: float = 0.5,
    max_bytes: int | None = None,
    max_parts: int | None = None,
) -> Session:
    """Trace this process into ``path`` until `stop`, the end of the ``with`` block, or the end of the process.

    Example::

        with pipesight.trace.start("run/trace.pfw.gz"):
            train()

    Args:
        path: The file, or a folder to write ``trace.pfw.gz`` into. The suffix ``.pfw.gz`` is added; under torchrun,
            the rank is too. Child processes write files of their own beside it, named by their process ID.
        compress: Compress the file with gzip.
        include_args: Write the arguments of events.
        track_labels: Write the lines by which Perfetto labels and sorts processes and threads.
        interval: At most this many seconds pass from the end of an event until it is on disk.
        max_bytes: Start another file, ``name.part2.pfw.gz``, before one grows beyond this size.
        max_parts: Keep this many of these files, and remove the oldest.

    Raises:
        TypeError: The path is neither a string nor a `pathlib.Path`.
        ValueError: A number is out of range.
        RuntimeError: Another trace is being written.
    """
    least, most = INTERVALS
    if not isinstance(interval, int | float) or not least <= interval <= most:
        raise ValueError(f"interval must be {least:g} to {most:g} seconds (interval: {interval!r})")
    for name, value in (("max_bytes", max_bytes), ("max_parts", max_parts)):
        if value is not None and not (isinstance(value, int | float) and 0 < value <= MOST and value == int(value)):
            raise ValueError(f"{name} must be a positive whole number, or None for no limit ({name}: {value!r})")
    given = _file_in(path)
    if _session is not None and _session.of_command:
        logger.warning(
            "`pipesight run` is already tracing this program, into %s; trace.start(%r) is ignored",
            _session.path,
            os.fspath(path),
        )
        return _Guest(_session._file)
    if _session is not None and not _session.from_environment:
        raise RuntimeError(f"already tracing into {str(_session.path)!r}; call pipesight.trace.stop() first")
    if _session is not None:  # the program takes precedence over the environment
        _session.stop()
    settings = Settings(
        log_file=given,
        inc_metadata=bool(include_args),
        trace_compression=bool(compress),
        track_labels=bool(track_labels),
        interval=interval,
        max_bytes=max_bytes,
        max_parts=max_parts,
    )
    return _start(given, settings, child=inherited("LOG_FILE") == str(given))


def _start(given: Path, settings: Settings, *, child: bool, from_environment: bool = False) -> Session:
    global _session
    if tracer.is_writing:  # `capture_events`
        encoder = tracer.encoder
        encoder.include_args, encoder.track_labels = settings.inc_metadata, settings.track_labels
    else:
        encoder = Encoder(
            include_args=settings.inc_metadata, track_labels=settings.track_labels, offset=inherited_clock()
        )
    file = TraceFile(
        given,
        encoder=encoder,
        child=child,
        compress=settings.trace_compression,
        max_bytes=settings.max_bytes,
        max_parts=settings.max_parts,
    )
    _session = Session(file, from_environment=from_environment)
    tracer.add(file, encoder, interval=settings.interval)
    update_forkserver_children()
    if not child:
        _session.environment_before = set_environment(handed_on(given, settings, encoder.offset))
    return _session


def _file_in(path: str | os.PathLike[str]) -> Path:
    """Return the file: ``trace`` in a folder, if the path is one."""
    text = checked_path(path, "a trace", "pass a file: start('trace.pfw.gz')")
    given = Path(text).absolute()
    return given / "trace" if given.is_dir() or text.endswith(os.sep) else given


def stop() -> None:
    """End the trace that `start` started; does nothing without one."""
    if _session is not None and not _session.of_command:
        _session.stop()


def flush() -> None:
    """Write all events that have ended so far to disk."""
    tracer.flush()


def on_finish(action: Callable[[], None], *, remove: bool = False) -> None:
    """Call ``action`` when the process ends, in whatever way, while a trace is being written; or no longer do so."""
    if remove:
        tracer.on_finish[:] = [other for other in tracer.on_finish if other != action]
    else:
        tracer.on_finish.append(action)


def ending() -> str | None:
    """Return what ends the process, such as ``SIGTERM`` or ``os._exit(1)``; ``None`` if it ends normally."""
    return tracer.ending


def start_if_asked() -> None:
    """Trace if the environment says so: the user's, or what the process that started this one handed on."""
    settings = Settings.from_environment()
    settings.set_log_level()
    if not settings.enable or settings.log_file is None or _session is not None:
        return
    try:
        child = inherited("PARENT") is not None
        _start(_file_in(settings.log_file), settings, child=child, from_environment=True)
    except (OSError, ValueError) as error:
        logger.warning("cannot trace into %r: %s", str(settings.log_file), error)


def follow_environment() -> None:
    """Start or stop a trace, or write it elsewhere, as the environment says now that it has been changed."""
    read_again()
    if _session is not None and _session.from_environment:
        _session.stop()
    start_if_asked()
