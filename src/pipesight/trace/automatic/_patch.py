"""Attributes of torch that are replaced for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]


class Patches:
    """Replaced attributes, and what else there is to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Let ``owner.name(*args)`` call ``around(original, *args)``; nothing, if this torch has no such name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        own = name in vars(owner)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def keep(self, handle: Any) -> None:
        """Remove a hook's handle with the rest."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()
