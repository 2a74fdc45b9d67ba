"""Hooks that a layer can be copied and pickled with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

from pipesight._torch.module_internals import not_compiled
from pipesight._torch.tensors import in_transform, is_tracing

__all__ = ["Hook", "Once", "OutsideHook"]


class Hook:
    """Calls a function, outside of what is compiled, traced or transformed. In a copy of the layer it does nothing."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Is called by the layer."""
        if is_compiling():
            return self._uncompiled(*args)
        return None if is_tracing() or in_transform() else self._function(*args)

    @not_compiled
    def _uncompiled(self, *args: Any) -> Any:
        return None if is_tracing() or in_transform() else self._function(*args)

    def stop(self) -> None:
        """Do nothing from now on: a compiled model calls hooks that it has no more."""
        self._function = nothing

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., None]]]:
        return Hook, (nothing,)


class OutsideHook(Hook):
    """A hook of a compiled module, called before and after its compiled code, of which it can be no part."""

    @not_compiled
    def __call__(self, *args: Any) -> Any:
        """Is called by the module."""
        return None if is_tracing() or in_transform() else self._function(*args)


class Once:
    """Calls a function for the first time only: a backward that is split into two comes by a tensor twice."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Is called by the tensor."""
        function, self._function = self._function, nothing
        function(*args)


def nothing(*_: Any) -> None:
    """Do nothing."""
