"""Whether a process of a run is still there, as far as that can be known from this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["KILLED", "ending_of", "is_gone", "may_restart"]

KILLED = "it was killed, or its machine went down"
"""What became of a run whose process is gone and that did not say how it ended."""

_TERMINATED = "SIGTERM"
_PATIENCE = 60.0
"""Seconds that a rank elsewhere may take to end after the others; torchrun grants 30."""


def may_restart(facts: Mapping[str, Any]) -> bool:
    """Return whether torchrun may start the ranks of a run anew: it has not ended itself, as far as is known."""
    return facts.get("launch") is not None and not is_gone(facts.get("ppid"), facts)


def ending_of(facts: Mapping[str, Any]) -> str | None:
    """Say which rank ended first, of a run in which SIGTERM is what torchrun then ended the others with."""
    others = facts.get("ends")
    if not isinstance(others, Mapping) or facts.get("outcome") not in (None, _TERMINATED):
        return None
    ends: dict[int, Mapping[str, Any]] = {0: facts, **others}
    ended = [str(own.get("ended")) for own in ends.values() if own.get("outcome") == _TERMINATED]
    if not ended:
        return None
    failed = {rank: own for rank, own in ends.items() if own.get("outcome") not in (None, "", "ok", _TERMINATED)}
    if failed:
        rank = min(failed, key=lambda rank: (str(failed[rank].get("ended")), rank))
        what = str(failed[rank]["outcome"]).strip().splitlines()[0].rstrip(".")
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
    """Return how long ago that was, or 0 if nobody knows."""
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
    except OSError:  # somebody else's
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # there is no such folder here
        return False
    return status.rpartition(")")[2].split()[0] in ("Z", "X")  # dead, and nobody has asked how it died
