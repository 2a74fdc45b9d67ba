"""Of a run that is going on: what its other ranks say of themselves, and which of its attempts it is that goes on.

A report takes the last attempt that left a trace. Here it is the one that ``run.json`` is of, which may have no trace
yet, while ranks that were quicker to start again may have one of the attempt after it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipesight.runs.reading.attempts import Attempt, attempt_in, choose, own_restarts
from pipesight.runs.reading.descriptions import complete
from pipesight.runs.reading.safe_open import without_refused
from pipesight.runs.reading.trace_files import read_object

__all__ = ["attempt_of_trace", "choose_attempt", "described", "read_ranks"]


def read_ranks(run: Path) -> dict[int, dict[str, Any]]:
    """Return what the other ranks say of themselves."""
    found = {}
    for path in without_refused((run / "ranks").glob("*.json"), run):
        try:
            facts = read_object(path)
            found[int(facts["rank"])] = facts
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return found


def described(facts: Mapping[str, Any], ranks: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what ``run.json`` says, with what other ranks know."""
    description = copy.deepcopy(dict(facts))
    for _, other in sorted(ranks.items()):
        complete(description, other)
    return description


def attempt_of_trace(path: Path) -> int:
    """Return the attempt that a trace is of.

    >>> attempt_of_trace(Path("rank-00000-restart-2-4711.part3.pfw.gz"))
    2
    """
    return attempt_in(path.name.split(".")[0])


def choose_attempt(
    run: Path, traces: Iterable[tuple[int, Path]], facts: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]
) -> Attempt:
    """Choose the attempt that goes on.

    Args:
        run: Its folder.
        traces: Those that there are, and their ranks.
        facts: What ``run.json`` says, if anything.
        ranks: What `read_ranks` returns.
    """
    apart = own_restarts(facts, ranks)
    found = {(rank, attempt_of_trace(path)) for rank, path in traces}
    if type(told := facts.get("restart")) is int and told >= 0:
        found = {(rank, number) for rank, number in found if rank in apart or number <= told} | {(0, told)}
    return choose(run, found, asked=None, description=facts, apart=apart)
