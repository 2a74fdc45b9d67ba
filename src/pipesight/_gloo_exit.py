"""Leave a job whose ranks are connected by gloo without a crash at exit."""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

__all__ = ["wait_for_gloo_at_exit"]

_PATIENCE = 5.0  # seconds
_LOOKS = 3  # in a row; a thread that waits for the GIL sleeps, too, but not while Python does


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Make Python wait, before it ends, until no thread of gloo's is at work. Once a process is enough.

    A thread of gloo's frees its tensors a moment after a collective is done. If Python has freed them before, the
    thread needs the GIL for that, which it cannot get any more when Python is ending: the process aborts, although all
    went well. ::

        Python    all_reduce ──────────────── done, frees the tensor, ends
        gloo             computes, reports it ─────────────────────────── frees the tensor
    """
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
