"""Notes when the process was stopped: by a signal, a debugger, its container, or for want of a processor."""

from __future__ import annotations

import threading
import time

from pipesight.runs.format import STOPPED
from pipesight.trace.point_events import instant

__all__ = ["StopWatch"]

BEAT = 0.05
"""Seconds between two looks at the clock."""
LEAST = 0.1
"""Seconds by which a look must be late."""
IDLE = 0.1
"""The share of these seconds that the process may have computed: one that computes is not stopped."""


class StopWatch:
    """A thread that looks at the clock at every beat, until it is closed.

    If it is late, though the process computed nothing, the process was stopped until then: an instant of the trace.
    """

    def __init__(self) -> None:
        self._open = threading.Lock()  # held until it is closed; waiting for a lock is one call, for an event twelve
        self._open.acquire()
        self._thread = threading.Thread(target=self._run, name="pipesight-stops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        if self._open.locked():
            self._open.release()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            begin, computed = time.perf_counter(), time.process_time()
            if self._open.acquire(timeout=BEAT):
                return
            late = time.perf_counter() - begin - BEAT
            if late >= LEAST and time.process_time() - computed <= IDLE * late:
                instant(STOPPED, microseconds=round(late * 1e6))
