"""Attributes of modules that are looked up with the micro-batch that asks, and hooks that fill what it has.

A module whose attributes are written gets a class that derives from its own, which looks them up.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any, Protocol

from torch import nn

from pipesight._patches import Patches

__all__ = ["LookedUp", "OwnHook", "look_up", "original_hook", "used", "watch_attributes"]


class Access(Protocol):
    """What answers for the micro-batch of this thread."""

    modules: Container[int]
    repeats: bool

    def note(self, module: nn.Module, name: str, value: Any, before: Any = None) -> None:
        """Keep what was just written into an attribute."""

    def note_buffer(self, module: nn.Module, name: str) -> None:
        """Note that another buffer was put in the place of one."""

    def forget(self, module: nn.Module, name: str) -> None:
        """Note that an attribute was deleted."""

    def read(self, module: nn.Module, name: str, left: Any) -> Any:
        """Return what an attribute is."""

    def function(self, function: Any) -> Any:
        """Return what to call for a hook."""


class _PerThread(threading.local):
    attributes: Access | None = None


_here = _PerThread()
_deriving = threading.Lock()


@contextlib.contextmanager
def used(attributes: Access) -> Iterator[None]:
    """Let this thread write and read attributes with a micro-batch within the block."""
    before, _here.attributes = _here.attributes, attributes
    try:
        yield
    finally:
        _here.attributes = before


@functools.cache
def watch_attributes() -> None:
    """Notice from now on, for good, what is written into attributes of modules."""
    Patches().wrap(nn.Module, "__setattr__", _write, may_raise=True)


def _write(original: Callable[..., None], module: nn.Module, name: str, value: Any) -> None:
    attributes = _here.attributes
    if attributes is None or id(module) not in attributes.modules:
        original(module, name, value)
        return
    before = vars(module).get(name)
    if attributes.repeats and isinstance(vars(type(module)).get(name), LookedUp):
        attributes.note(module, name, value)
        return
    original(module, name, value)
    if vars(module).get(name) is value:
        look_up(module, name)
        attributes.note(module, name, value, before)
    elif name in module._buffers:
        attributes.note_buffer(module, name)


def look_up(module: nn.Module, name: str) -> None:
    """Let a module look an attribute up with the micro-batch that asks."""
    if isinstance(vars(type(module)).get(name), LookedUp):
        return
    with _deriving:
        if _OWN not in vars(cls := type(module)):
            known = (sub for sub in cls.__subclasses__() if vars(sub).get(_OWN) is cls)
            object.__setattr__(module, "__class__", next(known, None) or _derived(cls))
        setattr(type(module), name, LookedUp(name))


_OWN = "_pipesight_derived_from"


def _derived(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class like that of a module; copies and pickles of the module have its own."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made: Any = cls.__reduce_ex__(self, protocol)
        if not isinstance(made, tuple):
            return made
        arguments = tuple(cls if one is type(self) else one for one in made[1])
        return (_new if made[0] is copyreg.__newobj__ else made[0], arguments, *made[2:])  # type: ignore[attr-defined]

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    derived: type[nn.Module] = metaclass(cls.__name__, (nn.Module,), {**names, _OWN: cls, "__reduce_ex__": reduce})
    derived.__bases__ = (cls,)  # not at once: that would call its `__init_subclass__`, which may keep a list of classes
    return derived


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    return cls.__new__(cls, *args)


class LookedUp:
    """Looks up an attribute of a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return getattr(vars(owner)[_OWN], self._name)
        left = vars(module)[self._name] if self._name in vars(module) else self._of_class(module, owner)
        attributes = _here.attributes
        return left if attributes is None else attributes.read(module, self._name, left)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if _here.attributes is not None:
            _here.attributes.forget(module, self._name)
        if self._name not in vars(module):
            raise AttributeError(self._name)
        del vars(module)[self._name]

    def _of_class(self, module: Any, owner: Any) -> Any:
        found = getattr(vars(owner)[_OWN], self._name)  # or `AttributeError`, and `nn.Module.__getattr__` goes on
        return found.__get__(module, owner) if hasattr(found, "__get__") else found


class OwnHook:
    """Calls a hook that fills what the micro-batch has that calls it. Copies of a module have the hook itself."""

    def __init__(self, hook: Any) -> None:
        functools.update_wrapper(self, hook)
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        attributes = _here.attributes
        return (self.hook if attributes is None else attributes.function(self.hook))(*args, **kwargs)

    def __reduce__(self) -> Any:
        return original_hook, (self.hook,)


def original_hook(hook: Any) -> Any:
    """Return the hook that one stands for; itself if it is none of these."""
    return hook.hook if isinstance(hook, OwnHook) else hook
