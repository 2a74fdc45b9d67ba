"""Wrap functions of torch for a while, without the program noticing.

A Python function stays the object that it is, under all its names; only its code is replaced. So names that were
imported before, ``is``, pickle, the tables of TorchScript and ``torch.compile``, and what others put around it
meanwhile all go on as ever, and nothing but the code has to be put back::

    torch.save                ─┐                    ┌ watched:  stand-in ── last layer ── first layer ── a copy of save
    torch.serialization.save  ─┼─ function ── code ─┤
    from torch import save    ─┘                    └ else:     its own

A method written in C has no code to replace. There, the attribute of its class is, by an object that is equal to it.
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
    """What is watched, and what else there is to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], *, may_raise: bool = False) -> None:
        """Let ``owner.name(*args)`` call ``around(original, *args)``; nothing, if this torch has no such name.

        Args:
            owner: A module or a class.
            name: Of a function, or of a method.
            around: Must call what it is given, once, with these arguments, and return the result. If it fails itself,
                that is reported once, and the program continues without it.
            may_raise: Let errors of ``around`` reach the program.
        """
        with _changing:
            place = _place(owner, name)
            if place is not None:
                layer = _Layer(around, f"{getattr(owner, '__name__', owner)}.{name}", may_raise)
                place.add(layer)
                self._undo.append(functools.partial(place.remove, layer))

    def keep(self, handle: Any) -> None:
        """Remove a hook's handle with the rest."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()


def harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose own errors are reported once instead of reaching the program."""
    complain = _Complaint(hook.__qualname__)

    @functools.wraps(hook)
    def careful(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            complain()

    return careful


class _Complaint:
    """Reports the first error, which is the one being handled."""

    def __init__(self, about: str) -> None:
        self._about = about
        self.made = False

    def __call__(self) -> None:
        if not self.made:
            self.made = True
            logger.exception("%s could not be recorded; the program continues", self._about)


class _Layer:
    """One of those who watch a function."""

    def __init__(self, around: Callable[..., Any], about: str, may_raise: bool) -> None:
        self._around, self._may_raise = around, may_raise
        self._complain = _Complaint(about)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._may_raise:
            return self._around(inner, *args, **kwargs)
        if self._complain.made:
            return inner(*args, **kwargs)
        call = _Call(inner)
        try:
            return self._around(call, *args, **kwargs)
        except Exception as error:
            if error is call.error:  # the program's
                raise
            self._complain()
            failed = call.error
        finally:
            call.error = None  # it refers to this frame
        if failed is not None:
            raise failed
        return call.result if call.returned else inner(*args, **kwargs)


class _Call:
    """Calls a function, and keeps what became of it."""

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
    """A function, or the attribute of a class, and those who watch it."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = self._run = original
        self._layers: list[_Layer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        return self._run(*args, **kwargs)

    def add(self, layer: _Layer) -> None:
        """Let somebody watch."""
        self._change([*self._layers, layer])
        if len(self._layers) == 1:
            self._install()

    def remove(self, layer: _Layer) -> None:
        """Let them watch no longer."""
        with _changing:
            self._change([other for other in self._layers if other is not layer])
            if not self._layers:
                self._uninstall()

    def _change(self, layers: list[_Layer]) -> None:
        run = self._original
        for layer in layers:
            run = functools.partial(layer, run)
        self._layers, self._run = layers, run

    @abc.abstractmethod
    def _install(self) -> None:
        """Let calls go through the layers."""

    @abc.abstractmethod
    def _uninstall(self) -> None:
        """Put back what was there."""


def _place(owner: Any, name: str) -> _Place | None:
    """Return the place that a name stands for: the same, whoever asks."""
    found: Any = getattr(owner, name, None)
    if isinstance(found, FunctionType):
        known = (found.__kwdefaults__ or {}).get(_KEY)
        return known if isinstance(known, _Function) else _Function(found)
    if isinstance(found, _EqualMethod):
        return found.place
    return None if found is None else _Attribute(owner, name, found)


class _Function(_Place):
    """A Python function, watched by another code."""

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
        vars(function).setdefault("__wrapped__", self._copy)  # for `inspect`: its signature, its source

    def _uninstall(self) -> None:
        function = self._function
        if function.__code__ is self._stand_in:  # else somebody else has replaced it
            function.__code__ = self._code
            function.__kwdefaults__ = self._copy.__kwdefaults__
            if vars(function).get("__wrapped__") is self._copy:
                del function.__wrapped__  # type: ignore[attr-defined]


def _stand_in(code: CodeType) -> CodeType:
    """Return code that hands its arguments on, and fits a function with the closure of this one."""
    names = ", ".join(code.co_freevars)
    body = f"return {_KEY}(*args, **kwargs); {names}"  # what comes last is never run
    made: dict[str, Any] = {}
    exec(f"def outer({names}):\n def inner(*args, {_KEY}, **kwargs): {body}\n return inner", made)
    function: FunctionType = made["outer"](*code.co_freevars)
    # By its file, the compiler knows what to do with a function.
    return function.__code__.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )


class _Attribute(_Place):
    """An attribute of a class, or of a module, that is no Python function."""

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)  # not `original`, which may be bound to the class
        self._stand_in = _EqualMethod(original, self)

    def _install(self) -> None:
        setattr(self._owner, self._name, self._stand_in)

    def _uninstall(self) -> None:
        if vars(self._owner).get(self._name) is not self._stand_in:
            return  # somebody has put something around it, or taken it away
        if self._before is not None:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


class _EqualMethod:
    """Stands in for a method written in C. ``__torch_function__`` looks methods up in tables, made before perhaps."""

    def __init__(self, original: Callable[..., Any], place: _Attribute) -> None:
        functools.update_wrapper(self, original)
        self.__module__ = getattr(original, "__module__", None)  # type: ignore[assignment]
        self.place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.place(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

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
