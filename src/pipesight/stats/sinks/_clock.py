"""The local time as log files write it."""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Tells the time, and works out the date and the seconds once a second only."""

    def __init__(self) -> None:
        self._second: tuple[int, str] = (-1, "")

    def now(self) -> str:
        """Return the time, as in ``2026-01-31 12:00:00,000``."""
        second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        known, text = self._second
        if second != known:
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._second = (second, text)
        return f"{text},{nanoseconds // 1_000_000:03d}"
