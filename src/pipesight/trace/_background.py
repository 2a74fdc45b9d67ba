"""Threads in the background: start them when needed, and wait for them as long as they make progress."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["BackgroundThread", "wait"]

_TURN = 0.05  # seconds


class BackgroundThread:
    """A daemon thread that is started when it is first needed, and again if it has died."""

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._name, self._target = name, target
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # reentrant: a signal handler may interrupt whoever holds it

    @property
    def was_started(self) -> bool:
        """Whether it was ever started."""
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether it is the calling thread."""
        return threading.current_thread() is self._thread

    def ensure_running(self) -> bool:
        """Start it, unless it is running or being started; return false if that is impossible."""
        if self._thread is not None and self._thread.is_alive():
            return True
        if not self._starting.acquire(blocking=False):
            return True
        try:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._target, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:  # the interpreter is shutting down
            return False
        finally:
            self._starting.release()
        return True

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        if self._thread is not None and not self.is_current:
            self._thread.join(seconds)


def wait(is_done: Callable[[float], bool], progress: Callable[[], object], patience: float) -> bool:
    """Wait until it is done, or ``progress`` has not changed for ``patience`` seconds; return whether it is done.

    Seconds are counted in turns of this thread, not by a clock: in a stopped process, or while one thread holds the
    GIL, no thread could make progress.

    ``is_done`` waits for the given number of seconds, and returns whether it is done; ``progress`` returns anything
    that changes while the other thread makes progress.
    """
    seen, turns = progress(), 0
    while not is_done(_TURN):
        now = progress()
        turns = turns + 1 if now == seen else 0
        seen = now
        if turns * _TURN >= patience:
            return False
    return True
