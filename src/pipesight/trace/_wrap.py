"""Decorators: a span around each run of a function's body, for every kind of function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar, cast

from pipesight.trace import _span_events
from pipesight.trace._span_events import Args, begin, current, end, resume

__all__ = ["Recordable", "wrap"]

F = TypeVar("F")


class Recordable(Protocol):
    """A node, or one use of it."""

    @property
    def recording(self) -> bool: ...

    @property
    def args(self) -> Args: ...

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None: ...


def wrap(function: F, node: Recordable) -> F:
    """Return ``function`` with a span of ``node`` around each run of its body.

    It may be a function, a method of any kind, a property, a generator, a coroutine or an asynchronous generator. The
    span of a generator lasts from its first item to its end; what its caller does between items is not nested in it.
    """
    wrapped: Any
    if isinstance(function, (staticmethod, classmethod)):
        wrapped = type(function)(wrap(function.__func__, node))
    elif isinstance(function, property):
        accessors: list[Any] = [f and wrap(f, node) for f in (function.fget, function.fset, function.fdel)]
        get, set_, delete = accessors
        wrapped = type(function)(get, set_, delete, function.__doc__)
    elif isinstance(function, functools.cached_property):
        wrapped = type(function)(wrap(function.func, node))
    elif isinstance(function, functools.partialmethod):
        wrapped = type(function)(wrap(function.func, node), *function.args, **function.keywords)
    elif isinstance(function, type) or not callable(function):
        raise TypeError(
            f"an event can decorate functions and methods, but got {function!r}; decorate the method that is to be "
            "recorded, such as __init__ or forward"
        )
    elif _is(inspect.isasyncgenfunction, function):
        wrapped = _wrap_async_generator(function, node)
    elif _is(inspect.iscoroutinefunction, function):
        wrapped = _wrap_coroutine(function, node)
    elif _is(inspect.isgeneratorfunction, function):
        wrapped = _wrap_generator(function, node)
    else:
        wrapped = _wrap_function(function, node)
    return cast(F, wrapped)


def _is(kind: Callable[[Any], bool], function: Any) -> bool:
    """Tell whether a function, or the ``__call__`` of an object, is of this kind."""
    return kind(function) or kind(type(function).__call__)


def _switch(node: Recordable) -> Recordable:
    """Return the object whose attribute ``recording`` is cheapest to read."""
    return getattr(node, "switch", node)


def _wrap_function(function: Callable[..., Any], node: Recordable) -> Callable[..., Any]:
    switch = _switch(node)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.recording:
            return function(*args, **kwargs)
        with node:
            return function(*args, **kwargs)

    return wrapper


def _wrap_coroutine(function: Callable[..., Any], node: Recordable) -> Callable[..., Any]:
    switch = _switch(node)

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.recording:
            return await function(*args, **kwargs)
        span = begin(node)
        try:
            return await function(*args, **kwargs)
        finally:
            end(span, node.args)

    return wrapper


def _wrap_generator(function: Callable[..., Any], node: Recordable) -> Callable[..., Any]:
    switch = _switch(node)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.recording or _span_events.is_compiling():
            return (yield from function(*args, **kwargs))
        span = _GeneratorSpan(node)
        try:
            return (yield from _Stepped(function(*args, **kwargs), span))
        finally:
            span.finish()

    return wrapper


def _wrap_async_generator(function: Callable[..., Any], node: Recordable) -> Callable[..., Any]:
    switch = _switch(node)

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        span = _GeneratorSpan(node) if switch.recording else _NoSpan()
        step, value = generator.asend, None
        try:
            while True:
                with span:
                    try:
                        item = await step(value)
                    except StopAsyncIteration:
                        return
                try:
                    value = yield item
                    step = generator.asend
                except GeneratorExit:
                    with span:
                        await generator.aclose()
                    raise
                except BaseException as error:
                    step, value = generator.athrow, error
        finally:
            value = None  # an error that has this frame in its traceback would keep itself alive
            span.finish()

    return wrapper


class _NoSpan:
    """The span of a generator that is not recorded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def finish(self) -> None:
        """Do nothing."""


class _GeneratorSpan(_NoSpan):
    """The span of a generator, entered whenever the generator runs; in between, the spans of its caller are open."""

    def __init__(self, node: Recordable) -> None:
        self._node = node
        self._outside = current()
        self._span = self._inside = begin(node)
        resume(self._outside)

    def __enter__(self) -> None:
        self._outside = current()
        resume(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = current()
        resume(self._outside)

    def finish(self) -> None:
        """End the span: the generator is exhausted, closed, or has raised."""
        end(self._span, self._node.args)


class _Stepped:
    """A generator for ``yield from`` that takes each step inside its span."""

    def __init__(self, generator: Generator[Any, Any, Any], span: _GeneratorSpan) -> None:
        self._generator, self._span = generator, span

    def __iter__(self) -> _Stepped:
        return self

    def __next__(self) -> Any:
        with self._span:
            return next(self._generator)

    def send(self, value: Any) -> Any:
        with self._span:
            return self._generator.send(value)

    def throw(self, *error: Any) -> Any:
        with self._span:
            return self._generator.throw(*error)

    def close(self) -> None:
        with self._span:
            self._generator.close()
