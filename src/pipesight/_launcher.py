"""What a launcher such as torchrun puts into the environment of a process: rank, job, number of restarts."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["environment_number", "launch", "launched_rank", "restarts", "with_attempt"]

_NAMED = re.compile(r"-restart-\d+$")


def launched_rank() -> int | None:
    """Return the rank in ``RANK``; ``None`` if there is none, or if it is not a number."""
    return environment_number("RANK")


def restarts() -> int:
    """Return how often the launcher has restarted this rank.

    torchrun counts per node, and only the restarts that its own ranks caused.
    """
    return environment_number("TORCHELASTIC_RESTART_COUNT") or 0


def environment_number(variable: str) -> int | None:
    """Return the number in an environment variable; ``None`` if there is none."""
    given = os.environ.get(variable, "")
    return int(given) if given.isdecimal() and given.isascii() and len(given) < 10 else None


def launch() -> str | None:
    """Return a name that is unique to this start of torchrun: the folder it made for the errors of its ranks.

    It begins with ``TORCHELASTIC_RUN_ID``, which alone is the same for all jobs without an ID::

        /tmp/torchelastic_nu3x1w2a/RUN-ID_5y0k3zlm/attempt_0/0/error.json
    """
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts[:-2]
    return folders[-2] if len(folders) > 1 and folders[-1].startswith("attempt_") else None


def with_attempt(name: str, restart: int) -> str:
    """Return the name of a rank's file with the number of the attempt, unless it has one already.

    >>> with_attempt("rank-00001", 2), with_attempt("rank-00001", 0), with_attempt("rank-00001-restart-3", 2)
    ('rank-00001-restart-2', 'rank-00001', 'rank-00001-restart-3')
    """
    return f"{name}-restart-{restart}" if restart and not _NAMED.search(name) else name
