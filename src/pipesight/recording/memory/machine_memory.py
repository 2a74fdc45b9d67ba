"""How much memory the process may use: that of the machine or, in a container, what its control groups allow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["machine_memory"]

GROUPS = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")
_FIRST, _SECOND = "memory.limit_in_bytes", "memory.max"
"""Where version 1 and 2 of control groups have the limit."""


def machine_memory() -> int | None:
    """Return the bytes of the machine, or the least limit of any control group that the process is in."""
    found = [limit for limit in _group_limits() if limit > 0]
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not on this system
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def _group_limits() -> Iterator[int]:
    """Yield the limits of the group and of those around it. A container may see its own group as the root."""
    with contextlib.suppress(OSError):
        for line in GROUPS.read_text().splitlines():
            _, controllers, own = [*line.split(":", 2), "", ""][:3]
            if controllers and "memory" not in controllers.split(","):
                continue
            root, name = (MOUNTED / "memory", _FIRST) if controllers else (MOUNTED, _SECOND)
            inner = root / own.lstrip("/")
            for folder in (inner, *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # no limit is "max", or a number larger than any memory
                    yield int((folder / name).read_text())
                if folder == root:
                    break
