"""Whether a process of a run is still there, as far as that can be known from this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["KILLED", "is_gone", "may_restart"]

KILLED = "it was killed, or its machine went down"
"""What became of a run whose process is gone and that did not say how it ended."""


def may_restart(facts: Mapping[str, Any]) -> bool:
    """Tell whether torchrun may start the ranks of a run anew: it has not ended itself, as far as is known."""
    return facts.get("launch") is not None and not is_gone(facts.get("ppid"), facts)


def is_gone(pid: object, facts: Mapping[str, Any]) -> bool:
    """Tell whether a process on the host of a run is known to have ended."""
    if not isinstance(pid, int) or not 0 < pid < 2**31 or facts.get("host") != os.uname().nodename:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # there is no such folder here
        return False
    return status.rpartition(")")[2].split()[0] in ("Z", "X")  # dead, and nobody has asked how it died
