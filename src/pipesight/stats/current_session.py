"""The session that API calls go to: that of the process, or the one that is calling a feature."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipesight.stats.stats_session import StatsSession

__all__ = ["running", "running_or_none", "serving"]

of_process: StatsSession | None = None
"""Set by `initialize`, and by `end_debug`."""

of_run: StatsSession | None = None
"""That of the run that is being recorded. Calls do not belong to it, but groups that the user sets count there too."""

_calling: ContextVar[StatsSession | None] = ContextVar("calling", default=None)


def running_or_none() -> StatsSession | None:
    """Return the session, or ``None``."""
    return _calling.get() or of_process


def running() -> StatsSession:
    """Return the session; ``RuntimeError`` if there is none."""
    session = running_or_none()
    if session is None:
        raise RuntimeError("statistics are not initialized; call initialize(config_file, ...) first")
    return session


@contextlib.contextmanager
def serving(session: StatsSession) -> Iterator[None]:
    """Make it the session of what a feature calls: a watched model has one of its own."""
    token = _calling.set(session)
    try:
        yield
    finally:
        _calling.reset(token)
