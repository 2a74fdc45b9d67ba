"""Events as programs written for DFTracer record them: `dft_fn`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar, Literal, TypeVar, overload

from pipesight.trace import _span_events
from pipesight.trace._args import named_args, plain_args
from pipesight.trace._compile import register_with_compiler
from pipesight.trace._loop import Loop
from pipesight.trace._recording_switch import is_recording
from pipesight.trace._span_events import NO_ARGS, Args, begin, begin_silently, end, remove
from pipesight.trace._wrap import wrap
from pipesight.trace.dftracer.log import dftracer

__all__ = ["dft_fn"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_PICKED = ("epoch", "step", "image_idx", "image_size")


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
        compiling = _span_events.is_compiling()
        self.name = str(name) if name else "compiled" if compiling else sys._getframe(1).f_code.co_name
        self.args: Args = NO_ARGS
        self._enable = enable
        self._since: int | None = None if compiling else _span_events.now()
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
        if not _span_events.is_compiling():
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if not _span_events.is_compiling():
            _span_events.end_innermost(self)

    def _open(self) -> None:
        (begin if self.recording else begin_silently)(self)

    def flush(self) -> dft_fn:
        """Record the event now: from the begin of the block, or else from when this was made or `reset`."""
        if _span_events.is_compiling():
            return self
        block = _span_events.innermost(lambda node: node is self)
        if block is not None:
            end(block, self.args)
            begin_silently(self)  # for the block's end to close
        elif self._since is not None and self.recording:
            _span_events.past(self, self._since, _span_events.now(), self.args)
            self._since = None
        return self

    def reset(self) -> dft_fn:
        """Begin the event anew."""
        if _span_events.is_compiling():
            return self
        block = _span_events.innermost(lambda node: node is self)
        if block is None:
            self._since = _span_events.now()
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

    @overload
    def iter(
        self,
        func: Iterable[T],
        name: str = "loop",
        iter_name: str = "step",
        include_yield: bool = True,
        include_iter: bool = True,
    ) -> Iterable[T]: ...

    @overload
    def iter(
        self,
        func: AsyncIterable[T],
        name: str = "loop",
        iter_name: str = "step",
        include_yield: bool = True,
        include_iter: bool = True,
    ) -> AsyncIterable[T]: ...

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
        if not _span_events.is_compiling():
            (begin if self.recording else begin_silently)(self)

    def __exit__(self, *_: object) -> None:
        if not _span_events.is_compiling():
            _span_events.end_innermost(self)


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
        if _span_events.is_compiling() or not event.recording:
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


def _qualified_name(function: Any) -> str:
    function = getattr(function, "fget", None) or getattr(function, "func", None) or function
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


register_with_compiler(dft_fn)
