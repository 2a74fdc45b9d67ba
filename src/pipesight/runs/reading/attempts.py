"""Attempts of a run: what torchrun started anew is in the same folder, and a report is of one of them.

    RUN/trace/rank-00000.pfw.gz             attempt 0
    RUN/trace/rank-00000-restart-1.pfw.gz   attempt 1
    RUN/stats/rank-00000-attempt-0.jsonl    attempt 0, put aside
    RUN/stats/rank-00000.jsonl              the last
    RUN/logs/rank-00000-restart-1.log       attempt 1

``run.json`` and the files in ``ranks`` are of the last one: each attempt writes its own over those before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Attempt", "attempt_in", "choose", "own_restarts", "without_attempt"]

_RESTART = re.compile(r"-restart-(\d{1,9})(?=-\d+$|$)")
_ASIDE = re.compile(r"-attempt-(\d{1,9})$")
_OF_ONE = ("pid", "started", "ended", "outcome", "ends", "left_out")
"""What ``run.json`` says of one attempt alone."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt is read; they count from 0, as torchrun counts restarts."""

    number: int = 0
    there: tuple[int, ...] = (0,)
    """Those that left a trace, in order."""
    restarts: int = 0
    """How often the run was started anew, as far as its folder tells."""
    described: bool = True
    """Whether ``run.json`` is of this one."""
    apart: Mapping[int, int] = field(default_factory=dict)
    """Ranks whose node counts restarts in its own way, and the number that the attempt has there."""

    def of_rank(self, rank: int) -> int:
        """Return the number that the files of a rank have."""
        return self.apart.get(rank, self.number) if self.described else self.number

    def has_statistics(self, path: Path) -> bool:
        """Tell whether a file of statistics is of this attempt."""
        found = _ASIDE.search(path.stem)
        return self.described if found is None else not self.described and int(found[1]) == self.number

    def has_log(self, path: Path, rank: int) -> bool:
        """Tell whether a log is of this attempt."""
        return attempt_in(path.stem) == self.of_rank(rank)

    def about(self, description: dict[str, Any]) -> dict[str, Any]:
        """Return what a description says that is true of this attempt."""
        return description if self.described else {k: v for k, v in description.items() if k not in _OF_ONE}

    def left_out(self, path: Path) -> str | None:
        """Return what to say of the others, if there are any."""
        others = [number for number in self.there if number != self.number]
        if not others:
            return None
        which = f"attempt{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        one = "it" if len(others) == 1 else "one"
        return f"left out: {which}; to see {one}: pipesight report {shlex.quote(str(path))} --attempt {others[-1]}"


def attempt_in(stem: str) -> int:
    """Return the attempt that the name of a trace or log says, without its suffix.

    >>> attempt_in("rank-00000-restart-2-4711"), attempt_in("rank-00000")
    (2, 0)
    """
    found = _RESTART.search(stem)
    return int(found[1]) if found else 0


def without_attempt(stem: str) -> str:
    """Return the name as that of the first attempt.

    >>> without_attempt("trace-restart-2-4711")
    'trace-4711'
    """
    return _RESTART.sub("", stem)


def own_restarts(description: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """Return how often each rank was restarted, if it is on another node than rank 0: these need not agree.

    On the same node, another number is that of an attempt in which the rank got further than in the last.
    """
    return {
        rank: restart
        for rank, facts in others.items()
        if facts.get("host") != description.get("host") and (restart := _count(facts)) is not None
    }


def choose(
    path: Path,
    found: Collection[tuple[int, int]],
    *,
    asked: int | None,
    description: Mapping[str, Any],
    apart: Mapping[int, int],
) -> Attempt:
    """Choose an attempt: the one that is asked for, or the last.

    Args:
        path: Of the run.
        found: The rank and the attempt of each file.
        asked: The one to choose.
        description: What ``run.json`` says.
        apart: What `own_restarts` returns.

    Raises:
        ValueError: It is not there.
    """
    told = _count(description)
    counted = {attempt for rank, attempt in found if rank not in apart} or {attempt for _, attempt in found}
    there = tuple(sorted(counted)) or (told or 0,)
    number = there[-1] if asked is None else asked
    if number not in there:
        raise ValueError(f"there is no attempt {asked} in {str(path)!r} (attempts: {', '.join(map(str, there))})")
    restarts = max(there[-1], told or 0) if path.is_dir() else 0
    return Attempt(number, there, restarts, number == (there[-1] if told is None else told), apart)


def _count(facts: Mapping[str, Any]) -> int | None:
    restart = facts.get("restart")
    return restart if type(restart) is int and restart >= 0 else None
