"""How long to wait for another thread: as long as it gets on, however slow it is."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["wait"]

_TURN = 0.05  # seconds


def wait(is_done: Callable[[float], bool], progress: Callable[[], object], patience: float) -> bool:
    """Wait until it is done, or nothing has changed for ``patience`` seconds; return whether it is done.

    The seconds are turns of this thread, not those of a clock: a process that was stopped, or a thread that kept
    Python's lock for long, gave nobody a chance to get on.

    Args:
        is_done: waits for so many seconds, and tells whether it is done.
        progress: anything that changes while the other gets on.
        patience: how many seconds without a change to wait.
    """
    seen, turns = progress(), 0
    while not is_done(_TURN):
        now = progress()
        turns = turns + 1 if now == seen else 0
        seen = now
        if turns * _TURN >= patience:
            return False
    return True
