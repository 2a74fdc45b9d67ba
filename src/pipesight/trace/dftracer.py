"""DFTracer's own interface: ``dftracer``, which begins and ends a trace, and ``dft_fn``, which records events.

The shim ``pipesight-dftracer`` has these under DFTracer's import names. New code is better off with `pipesight.trace`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, FunctionType
from typing import Any, ClassVar, Literal, TypeVar, overload

from pipesight.trace import _span, session
from pipesight.trace._args import named_args, plain, plain_args
from pipesight.trace._compile import know
from pipesight.trace._loop import Loop
from pipesight.trace._span import EVENTS, METADATA, NO_ARGS, Args, Span, begin, begin_silently, end, remove
from pipesight.trace._tracer import tracer
from pipesight.trace._wrap import wrap
from pipesight.trace.node import is_recording
from pipesight.trace.settings import Settings

__all__ = ["DFTRACER_ENABLE", "DFTRACER_LOG_LEVEL", "dft_fn", "dftracer"]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

DFTRACER_ENABLE = Settings.from_environment().enable is not False
"""Whether the environment lets `dftracer.initialize_log` begin a trace; of the moment of this import."""

DFTRACER_LOG_LEVEL = Settings.from_environment().log_level
"""The level of the logger ``pipesight.trace`` that the environment asks for."""

_DEFAULT_FILE = Path("trace.pfw")
_PICKED = ("epoch", "step", "image_idx", "image_size")


class dftracer:  # noqa: N801
    """The trace of this process, as DFTracer's programs handle it.

    Example::

        log = dftracer.initialize_log("run/trace.pfw", None, -1)
        train()
        log.finalize()
    """

    _instance: ClassVar[dftracer | None] = None

    def __init__(self) -> None:
        self._session: session.Session | None = None

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
        """Begin to trace into ``logfile``, unless the environment says ``DFTRACER_ENABLE=0``.

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
        _set_level(settings.log_level)
        if settings.enable is not False:
            asked = None if logfile is None or isinstance(logfile, EllipsisType) else _numbered(logfile, process_id)
            instance._begin(asked, settings, process_id)
        return instance

    def _begin(self, asked: Path | None, settings: Settings, process_id: int) -> None:
        running = session._session
        if running is not None:
            from_outside = running.from_environment or _is_forked()
            if asked is None or _same(asked, settings.log_file):
                self._session = running if from_outside else self._session
                return
            if not from_outside:
                logger.warning("a trace is being written already, to %s; %s is not begun", running.path, asked)
                return
            running.stop()
        self._session = session.start(
            asked or _numbered(settings.log_file or _DEFAULT_FILE, process_id),
            compress=settings.trace_compression,
            include_args=settings.inc_metadata,
            interval=settings.interval,
            max_bytes=settings.max_bytes,
        )
        logger.info("tracing into %s", self._session.path)

    def finalize(self) -> None:
        """Write what is left, and end the trace that `initialize_log` began or took over."""
        if self._session is None:
            session.flush()
        else:
            self._session.stop()
            self._session = None

    def get_time(self) -> int:
        """Return the time of the trace, in microseconds."""
        return tracer.encoder.microseconds(_span.now())

    # Events by hand.

    def enter_event(self) -> None:
        """Begin an event that `log_event` describes and `exit_event` leaves; what begins in between is nested in it."""
        if is_recording():
            begin(_Entered())
        else:
            begin_silently(_Entered(logged=True))

    def exit_event(self) -> None:
        """Leave what the last `enter_event` began."""
        span = _innermost(lambda node: isinstance(node, _Entered))
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
        span = _span.current()
        if isinstance(span[0], _Entered) and not span[0].logged:
            span[0].logged = True
            EVENTS.extend((event, span[1], span[2][1], start, stop, span[4], span[5], args))
        else:
            _span.past(event, start, stop, args)

    def log_metadata_event(self, key: str, value: object) -> None:
        """Note a fact about this run."""
        if is_recording():
            _span.put(METADATA, {"name": str(plain(key)), "value": str(plain(value))})

    set_app_metadata_int = set_app_metadata_string = log_metadata_event


class dft_fn:  # noqa: N801
    """Events of one category: of functions, of loops, or of a block of code.

    Example::

        compute = dft_fn("compute")

        @compute.log
        def forward(model, x): ...

        with dft_fn("io", name="read") as event:
            event.update(step=3, args={"bytes": 4096})

    Args:
        cat: the category.
        name: of the block; functions go by their own. By default, that of the function which makes this object.
        epoch, step, image_idx, image_size: arguments of all its events.
        enable: whether it records anything.
    """

    phase: ClassVar[Literal["X"]] = "X"

    def __init__(
        self,
        cat: str,
        name: str | None = None,
        epoch: int | None = None,
        step: int | None = None,
        image_idx: int | None = None,
        image_size: Any = None,
        enable: bool = True,
    ) -> None:
        self.category = str(cat)
        compiling = _span.is_compiling()
        self.name = str(name) if name else "compiled" if compiling else sys._getframe(1).f_code.co_name
        self.args: Args = NO_ARGS
        self._enable = enable
        self._since: int | None = None if compiling else _span.now()
        self.update(epoch, step, image_idx, image_size)

    @property
    def recording(self) -> bool:
        """Whether an event that begins now is recorded."""
        return self._enable and is_recording()

    def update(
        self,
        epoch: int | None = None,
        step: int | None = None,
        image_idx: int | None = None,
        image_size: Any = None,
        args: Mapping[str, Any] | None = None,
    ) -> dft_fn:
        """Add arguments to its events that end from now on."""
        new = named_args(epoch, step, image_idx, image_size, args)
        if new:
            self.args = {**self.args, **new}
        return self

    def log_metadata(self, key: str, value: object) -> None:
        """Note a fact about this run."""
        if self._enable:
            dftracer.get_instance().log_metadata_event(key, value)

    # A block of code.

    def __enter__(self) -> dft_fn:
        if not _span.is_compiling():
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if not _span.is_compiling():
            _span.end_innermost(self)

    def _open(self) -> None:
        (begin if self.recording else begin_silently)(self)

    def flush(self) -> dft_fn:
        """Record the event now: from the begin of the block, or else from when this was made or `reset`."""
        if _span.is_compiling():
            return self
        block = _innermost(lambda node: node is self)
        if block is not None:
            end(block, self.args)
            begin_silently(self)  # for the block's end to close
        elif self._since is not None and self.recording:
            _span.past(self, self._since, _span.now(), self.args)
            self._since = None
        return self

    def reset(self) -> dft_fn:
        """Begin the event anew."""
        if _span.is_compiling():
            return self
        block = _innermost(lambda node: node is self)
        if block is None:
            self._since = _span.now()
        else:
            remove(block)
            self._open()
        return self

    # A function.

    @overload
    def log(self, function: F, /, name: str | None = None) -> F: ...

    @overload
    def log(self, function: None = None, /, name: str | None = None) -> Callable[[F], F]: ...

    def log(self, function: Any = None, /, name: str | None = None) -> Any:
        """Decorate a function: each run of it is an event, named as the function unless there is a ``name``.

        The arguments epoch, step, image_idx and image_size of a call, or else attributes of ``self``, go with it.
        """
        if function is None:
            return functools.partial(self.log, name=name)
        event = _Named(self, name or _qualified_name(function))
        return _log_calls(function, event) if isinstance(function, FunctionType) else wrap(function, event)

    log_init = log_static = log

    # A loop.

    def iter(
        self,
        func: Any,
        name: str = "loop",
        iter_name: str = "step",
        include_yield: bool = True,
        include_iter: bool = True,
    ) -> Any:
        """Iterate; each wait for an item is an event ``name.iter``, each run of the loop's body ``name.yield``.

        Both have the item's number, from 1, as the argument ``iter_name``.
        """
        wait = _Named(self, f"{name}.iter") if include_iter else None
        body = _Named(self, f"{name}.yield") if include_yield else None
        return _CountedLoop(func, wait, body, str(iter_name))


class _Named:
    """The events of a `dft_fn` that have a name of their own."""

    phase = "X"

    def __init__(self, owner: dft_fn, name: str) -> None:
        self.name, self.category, self._owner = str(name), owner.category, owner

    @property
    def recording(self) -> bool:
        return self._owner.recording

    @property
    def args(self) -> Args:
        return self._owner.args

    def __enter__(self) -> None:
        if not _span.is_compiling():
            (begin if self.recording else begin_silently)(self)

    def __exit__(self, *_: object) -> None:
        if not _span.is_compiling():
            _span.end_innermost(self)


class _CountedLoop(Loop):
    """A loop in which the program says what the number of an item is called."""

    def __init__(self, iterable: Any, wait: _Named | None, body: _Named | None, count_name: str) -> None:
        super().__init__(iterable, wait, body)
        self._count_name = count_name

    def _args_of(self, node: Any) -> dict[str, Any]:
        return {**node.args, self._count_name: self._count}


def _log_calls(function: FunctionType, event: _Named) -> Any:
    """Return ``function`` with an event around each call; of generators and coroutines, around their whole run."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_of(function) for is_of in kinds):
        return wrap(function, event)
    pick = _Pick(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _span.is_compiling() or not event.recording:
            return function(*args, **kwargs)
        picked = pick(args, kwargs)
        span = begin(event)
        try:
            return function(*args, **kwargs)
        finally:
            end(span, {**event.args, **picked} if picked else event.args)

    return wrapper


class _Pick:
    """Finds the arguments of a call that go with its event."""

    def __init__(self, function: FunctionType) -> None:
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        self._of_self = names[:1] == ["self"]
        self._of_call = [
            (name, names.index(name) if parameters[name].kind != inspect.Parameter.KEYWORD_ONLY else sys.maxsize)
            for name in _PICKED
            if name in parameters
        ]
        empty = inspect.Parameter.empty
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not empty}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._of_self and args:
            found.update(_attributes(args[0]))
        for name, index in self._of_call:
            value = args[index] if index < len(args) else kwargs.get(name, self._defaults.get(name))
            if value is not None:
                found[name] = value
        return plain_args(found) if found else found


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    for name in _PICKED:
        try:
            value = getattr(owner, name, None)
        except Exception:  # of the user's own property
            continue
        if value is not None and not callable(value):  # optimizers have a method `step`
            yield name, value


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


def _innermost(wanted: Callable[[Any], bool]) -> Span | None:
    span: Span | None = _span.current()
    while span is not None and not wanted(span[0]):
        span = span[2]
    return span


def _untagged(value: Any) -> Any:
    """Return what DFTracer 2 gives as a pair: how to index it, and the value."""
    return value[1] if isinstance(value, tuple) and len(value) == 2 else value


def _qualified_name(function: Any) -> str:
    function = getattr(function, "fget", None) or getattr(function, "func", None) or function
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _set_level(level: str | None) -> None:
    if level is None:
        return
    if level.strip().upper() in logging.getLevelNamesMapping():
        logging.getLogger("pipesight.trace").setLevel(level.strip().upper())
    else:
        logger.warning("DFTRACER_LOG_LEVEL must be DEBUG, INFO, WARN or ERROR, but is %r; ignored", level)


def _numbered(file: str | os.PathLike[str], process_id: int) -> Path:
    path = Path(file)
    return path if process_id < 0 else path.with_name(f"{_stem(path)}-{process_id}.pfw")


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".pfw")


def _same(asked: Path, other: Path | None) -> bool:
    if other is None:
        return False
    return (asked.absolute().parent, _stem(asked)) == (other.absolute().parent, _stem(other))


def _is_forked() -> bool:
    """Tell whether the trace of this process is that of another, which this one was forked from."""
    return os.environ.get("PIPESIGHT_PARENT") != str(os.getpid())


know(dft_fn)
