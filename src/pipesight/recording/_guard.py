"""Errors of the recording must not reach the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from pipesight._logger import own_logger

__all__ = ["Guard"]

logger = own_logger(__name__)

_P = ParamSpec("_P")


class Guard:
    """Calls functions, and logs what they raise, once for each kind of work."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, what: str, action: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call ``action``; ``what`` completes *the recording of a run could not ...*."""
        try:
            action(*args, **kwargs)
        except Exception:
            if what not in self._logged:
                self._logged.add(what)
                logger.exception("the recording of a run could not %s; training goes on", what)
