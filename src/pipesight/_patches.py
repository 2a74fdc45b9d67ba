"""Wrap functions of torch for a while, without the program noticing.

A Python function stays the same object, under all its names; only its code is replaced. So names imported earlier,
``is``, pickle, the tables of TorchScript and ``torch.compile``, and wrappers that others add meanwhile all keep
working, and only the code has to be restored::

    torch.save                ─┐                    ┌ wrapped:  stand-in ── last wrapper ── first wrapper ── its copy
    torch.serialization.save  ─┼─ function ── code ─┤
    from torch import save    ─┘                    └ else:     its own

A method written in C has no code to replace. There, the attribute of its class is replaced by an object equal to it.
"""

from __future__ import annotations

import abc
import functools
import logging
import threading
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

__all__ = ["Patches", "harmless"]

logger = logging.getLogger(__name__)

_KEY = "__pipesight__"  # the argument of a stand-in that holds what to call
_changing = threading.RLock()


class Patches:
    """Wrapped functions and hooks, which `undo` removes together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], *, may_raise: bool = False) -> None:
        """Let ``owner.name(*args)`` call ``around(original, *args)``. Does nothing if this torch has no such name.

        Args:
            owner: A module or a class.
            name: The name of a function or method.
            around: Must call ``original`` once, with these arguments, and return its result. If ``around`` itself
                fails, that is logged once, and the program continues without it.
            may_raise: Let errors of ``around`` reach the program.
        """
        with _changing:
            place = _place(owner, name)
            if place is not None:
                wrapper = _Wrapper(around, f"{getattr(owner, '__name__', owner)}.{name}", may_raise)
                place.add(wrapper)
                self._undo.append(functools.partial(place.remove, wrapper))

    def keep(self, handle: Any) -> None:
        """Remove a hook with the rest, by its handle."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Restore everything, last first."""
        while self._undo:
            self._undo.pop()()


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose errors are logged once and do not reach the program."""
    log_error = _LogOnce(hook.__qualname__)

    @functools.wraps(hook)
    def careful(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            log_error()

    return careful


class _LogOnce:
    """Logs the exception being handled, the first time it is called."""

    def __init__(self, about: str) -> None:
        self._about = about
        self.done = False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            logger.exception("%s could not be recorded; the program continues", self._about)


class _Wrapper:
    """One wrapper of a function."""

    def __init__(self, around: Callable[..., Any], about: str, may_raise: bool) -> None:
        self.around, self.may_raise = around, may_raise
        self._log_error = _LogOnce(about)

    def call_carefully(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._log_error.done:
            return inner(*args, **kwargs)
        call = _Call(inner)
        try:
            return self.around(call, *args, **kwargs)
        except Exception as error:
            if error is call.error:  # the original raised it
                raise
            self._log_error()
            failed = call.error
        finally:
            call.error = None  # else a reference cycle: its traceback refers to this frame
        if failed is not None:
            raise failed
        return call.result if call.returned else inner(*args, **kwargs)


class _Call:
    """Calls a function, and keeps its result or error."""

    __slots__ = ("_function", "error", "result", "returned")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.returned, self.result = function, False, None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.returned = True
        return self.result


class _Place(abc.ABC):
    """A function, or an attribute of a class, and its wrappers."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = self._run = original
        self._wrappers: list[_Wrapper] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        return self._run(*args, **kwargs)

    def add(self, wrapper: _Wrapper) -> None:
        """Add a wrapper."""
        self._change([*self._wrappers, wrapper])
        if len(self._wrappers) == 1:
            self._install()

    def remove(self, wrapper: _Wrapper) -> None:
        """Remove a wrapper."""
        with _changing:
            self._change([other for other in self._wrappers if other is not wrapper])
            if not self._wrappers:
                self._uninstall()

    def _change(self, wrappers: list[_Wrapper]) -> None:
        run = self._original
        for wrapper in wrappers:
            run = functools.partial(wrapper.around if wrapper.may_raise else wrapper.call_carefully, run)
        self._wrappers, self._run = wrappers, run

    @abc.abstractmethod
    def _install(self) -> None:
        """Let calls go through the wrappers."""

    @abc.abstractmethod
    def _uninstall(self) -> None:
        """Restore what was there."""


def _place(owner: Any, name: str) -> _Place | None:
    """Return the place of a name: the same object every time while it is wrapped."""
    found: Any = getattr(owner, name, None)
    if isinstance(found, FunctionType):
        known = (found.__kwdefaults__ or {}).get(_KEY)
        return known if isinstance(known, _Function) else _Function(found)
    if isinstance(found, _EqualMethod):
        return found.place
    return None if found is None else _Attribute(owner, name, found)


class _Function(_Place):
    """A Python function, whose code is replaced."""

    def __init__(self, function: FunctionType) -> None:
        copy = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(copy, function)
        del copy.__wrapped__  # type: ignore[attr-defined]
        vars(copy).update(vars(function))
        super().__init__(copy)
        self._function, self._copy = function, copy
        self._code, self._stand_in = function.__code__, _stand_in(function.__code__)

    def _install(self) -> None:
        function = self._function
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), _KEY: self}
        function.__code__ = self._stand_in
        vars(function).setdefault("__wrapped__", self._copy)  # `inspect` finds its signature and source there

    def _uninstall(self) -> None:
        function = self._function
        if function.__code__ is self._stand_in:  # else somebody has replaced it too
            function.__code__ = self._code
            function.__kwdefaults__ = self._copy.__kwdefaults__
            if vars(function).get("__wrapped__") is self._copy:
                del function.__wrapped__  # type: ignore[attr-defined]


def _stand_in(code: CodeType) -> CodeType:
    """Return code that passes its arguments on, for a function with the same closure variables."""
    names = ", ".join(code.co_freevars)
    body = f"return {_KEY}(*args, **kwargs); {names}"  # naming them makes them closure variables; it never runs
    made: dict[str, Any] = {}
    exec(f"def outer({names}):\n def inner(*args, {_KEY}, **kwargs): {body}\n return inner", made)
    function: FunctionType = made["outer"](*code.co_freevars)
    # The compiler decides by its file how to treat a function.
    return function.__code__.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )


class _Attribute(_Place):
    """An attribute of a class or module that is not a Python function."""

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)  # not `original`, which may be bound to the class
        self._stand_in = _EqualMethod(original, self)

    def _install(self) -> None:
        setattr(self._owner, self._name, self._stand_in)

    def _uninstall(self) -> None:
        if vars(self._owner).get(self._name) is not self._stand_in:
            return  # somebody has wrapped or removed it
        if self._before is not None:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


class _EqualMethod:
    """Stands in for a method written in C, and equals it: ``__torch_function__`` looks methods up in tables."""

    def __init__(self, original: Callable[..., Any], place: _Attribute) -> None:
        functools.update_wrapper(self, original)
        self.__module__ = getattr(original, "__module__", None)  # type: ignore[assignment]
        self.place, self._call = place, place.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self._call, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self.__wrapped__)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce__(self) -> Any:
        return self.__wrapped__.__reduce__()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["__wrapped__"], name)
