"""Wait for another thread as long as it makes progress, however slow it is."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["wait"]

_TURN = 0.05  # seconds


def wait(is_done: Callable[[float], bool], progress: Callable[[], object], patience: float) -> bool:
    """Wait until it is done, or ``progress`` has not changed for ``patience`` seconds; return whether it is done.

    Seconds are counted in turns of this thread, not by a clock: in a stopped process, or while one thread holds the
    GIL, nobody could make progress.

    Args:
        is_done: Waits for the given number of seconds, and returns whether it is done.
        progress: Returns anything that changes while the other thread makes progress.
        patience: Seconds without progress after which to give up.
    """
    seen, turns = progress(), 0
    while not is_done(_TURN):
        now = progress()
        turns = turns + 1 if now == seen else 0
        seen = now
        if turns * _TURN >= patience:
            return False
    return True
