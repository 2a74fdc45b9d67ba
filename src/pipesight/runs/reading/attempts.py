"""Attempts of a run: when torchrun restarts it, it records into the same folder; a report covers one attempt.

    RUN/trace/rank-00000.pfw.gz             attempt 0
    RUN/trace/rank-00000-restart-1.pfw.gz   attempt 1
    RUN/stats/rank-00000-attempt-0.jsonl    attempt 0, renamed by the next
    RUN/stats/rank-00000.jsonl              the last attempt
    RUN/logs/rank-00000-restart-1.log       attempt 1

``run.json`` and the files in ``ranks`` describe the last attempt: each one overwrites those of the one before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipesight._plurals import plural

__all__ = ["Attempt", "attempt_in", "attempt_of_trace", "choose", "choose_running", "own_restarts", "without_attempt"]

_RESTART = re.compile(r"-restart-(\d{1,9})(?=-\d+$|$)")
_ASIDE = re.compile(r"-attempt-(\d{1,9})$")
_OF_ONE = ("pid", "started", "ended", "outcome", "ends", "left_out")
"""What ``run.json`` says of one attempt alone."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt that is read, counted from 0 as torchrun counts restarts."""

    number: int = 0
    there: tuple[int, ...] = (0,)
    """The attempts that have a trace, in order."""
    restarts: int = 0
    """How often the run was restarted, as far as its folder shows."""
    described: bool = True
    """Whether ``run.json`` is of this attempt."""
    apart: Mapping[int, int] = field(default_factory=dict)
    """Ranks on nodes that count restarts differently, and the number of the attempt there."""

    def of_rank(self, rank: int) -> int:
        """Return the number of the attempt in the names of a rank's files."""
        return self.apart.get(rank, self.number) if self.described else self.number

    def has_statistics(self, path: Path) -> bool:
        """Return whether a file of statistics belongs to this attempt."""
        found = _ASIDE.search(path.stem)
        return self.described if found is None else not self.described and int(found[1]) == self.number

    def has_log(self, path: Path, rank: int) -> bool:
        """Return whether a log belongs to this attempt."""
        return attempt_in(path.stem) == self.of_rank(rank)

    def about(self, description: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a description that holds for this attempt."""
        return description if self.described else {k: v for k, v in description.items() if k not in _OF_ONE}

    def others_note(self, path: Path) -> str | None:
        """Return a note on the other attempts, if there are any."""
        others = [number for number in self.there if number != self.number]
        if not others:
            return None
        which = f"{plural(len(others), 'attempt')} {', '.join(map(str, others))}"
        see = f"pipesight report {shlex.quote(str(path))} --attempt {others[-1]}"
        return f"not in this report: {which}; to see {others[-1]}: {see}"


def attempt_in(stem: str) -> int:
    """Return the attempt in the name of a trace or log, given without its suffix.

    >>> attempt_in("rank-00000-restart-2-4711"), attempt_in("rank-00000")
    (2, 0)
    """
    found = _RESTART.search(stem)
    return int(found[1]) if found else 0


def without_attempt(stem: str) -> str:
    """Return the name that the file has in the first attempt.

    >>> without_attempt("trace-restart-2-4711")
    'trace-4711'
    """
    return _RESTART.sub("", stem)


def own_restarts(description: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """Return how often each rank on another node than rank 0 was restarted: nodes count for themselves.

    On the same node, a different number is that of an attempt in which the rank got further than in the last.
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
    """Choose the attempt that is asked for, or the last.

    ``found`` has the rank and the attempt of each file; ``apart`` is what `own_restarts` returns.

    Raises:
        ValueError: There is no such attempt.
    """
    told = _count(description)
    counted = {attempt for rank, attempt in found if rank not in apart} or {attempt for _, attempt in found}
    there = tuple(sorted(counted)) or (told or 0,)
    number = there[-1] if asked is None else asked
    if number not in there:
        raise ValueError(f"no attempt {asked} in {str(path)!r} (attempts: {', '.join(map(str, there))})")
    restarts = max(there[-1], told or 0) if path.is_dir() else 0
    return Attempt(number, there, restarts, number == (there[-1] if told is None else told), apart)


def attempt_of_trace(path: Path) -> int:
    """Return the attempt that a trace belongs to.

    >>> attempt_of_trace(Path("rank-00000-restart-2-4711.part3.pfw.gz"))
    2
    """
    return attempt_in(path.name.split(".")[0])


def choose_running(
    run: Path, traces: Iterable[tuple[int, Path]], facts: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]
) -> Attempt:
    """Choose the attempt that is running: the one of ``run.json``.

    It may have no trace yet, while ranks that restarted sooner may have one of the attempt after it.
    """
    apart = own_restarts(facts, ranks)
    found = {(rank, attempt_of_trace(path)) for rank, path in traces}
    if (told := _count(facts)) is not None:
        found = {(rank, number) for rank, number in found if rank in apart or number <= told} | {(0, told)}
    return choose(run, found, asked=None, description=facts, apart=apart)


def _count(facts: Mapping[str, Any]) -> int | None:
    restart = facts.get("restart")
    return restart if type(restart) is int and restart >= 0 else None
