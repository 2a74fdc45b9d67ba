"""Whether a process of a run is still alive, as far as this machine can tell, and which rank ended first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["KILLED", "ending_of", "is_gone", "may_restart"]

KILLED = "it was killed, or its machine went down"
"""The outcome of a run whose process is gone without having written one."""

_TERMINATED = "SIGTERM"
_PATIENCE = 60.0
"""Seconds that a rank on another host may take to end after the others; torchrun allows 30."""


def may_restart(facts: Mapping[str, Any]) -> bool:
    """Return whether torchrun may still restart the ranks of a run: it has not ended, as far as is known."""
    return facts.get("launch") is not None and not is_gone(facts.get("ppid"), facts)


def ending_of(facts: Mapping[str, Any]) -> str | None:
    """Name the rank that ended first, if torchrun then ended the others with SIGTERM; ``None`` if that is not known."""
    others = facts.get("ends")
    if not isinstance(others, Mapping) or facts.get("outcome") not in (None, _TERMINATED):
        return None
    ends: dict[int, Mapping[str, Any]] = {0: facts, **others}
    ended = [str(own.get("ended")) for own in ends.values() if own.get("outcome") == _TERMINATED]
    if not ended:
        return None
    outcomes = {rank: str(own.get("outcome") or "").strip() for rank, own in ends.items()}
    failed = [rank for rank, outcome in outcomes.items() if outcome not in ("", "ok", _TERMINATED)]
    if failed:
        rank = min(failed, key=lambda rank: (str(ends[rank].get("ended")), rank))
        what = outcomes[rank].splitlines()[0].rstrip(".")
        return f"rank {rank} ended with {what}; others were then ended with {_TERMINATED}"
    waited = _seconds_since(max(ended))
    gone = [
        rank
        for rank, own in sorted(ends.items())
        if own.get("outcome") is None
        and (waited > _PATIENCE if own.get("host") != os.uname().nodename else is_gone(own.get("pid"), own))
    ]
    if not gone:
        return None
    *most, last = map(str, gone)
    who = f"ranks {', '.join(most)} and {last} were" if most else f"rank {last} was"
    whose = "their machine" if most else "its machine"
    return f"{who} killed, or {whose} went down; the others were then ended with {_TERMINATED}"


def _seconds_since(moment: str) -> float:
    """Return how long ago that was; 0 if it is not a time."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(moment).astimezone(UTC)).total_seconds()
    except (ValueError, OverflowError):
        return 0.0


def is_gone(pid: object, facts: Mapping[str, Any]) -> bool:
    """Return whether a process on the host of a run is known to have ended."""
    if not isinstance(pid, int) or not 0 < pid < 2**31 or facts.get("host") != os.uname().nodename:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # not on Linux
        return False
    return status.rpartition(")")[2].split()[0] in ("Z", "X")  # dead, and not waited for by its parent
