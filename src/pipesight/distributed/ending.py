"""The end of a process that used gloo, which has threads of its own for collectives.

A thread lets go of its tensors a moment after the collective is done. If Python has let go of them before, it needs the
GIL for that, which it cannot get any more when Python is ending: the process aborts, although all went well. ::

    Python    all_reduce ──────────────── done, lets go of the tensor, ends
    gloo             computes, says so ────────────────────────────────── lets go of the tensor

So Python waits, before it ends, until no thread of gloo's is about to do something.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

__all__ = ["wait_at_exit"]

_PATIENCE = 5.0  # seconds
_LOOKS = 3  # in a row; a thread that waits for the GIL sleeps, too, but not while Python does


@functools.cache
def wait_at_exit() -> None:
    """Let Python wait for gloo's threads when it ends. Once is enough."""
    atexit.register(_wait)


def _wait() -> None:
    until = time.monotonic() + _PATIENCE
    idle = 0
    while idle < _LOOKS and time.monotonic() < until:
        time.sleep(0.001)
        idle = 0 if any(map(_at_work, Path("/proc/self/task").glob("*"))) else idle + 1


def _at_work(thread: Path) -> bool:
    try:
        if not (thread / "comm").read_text().startswith("pt_gloo"):
            return False
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] != "S"
    except OSError:
        return False  # it has ended, or this system does not tell
