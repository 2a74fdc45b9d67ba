"""What torchrun says of an attempt: which job it belongs to, and how often the ranks were started anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["launch", "restarts", "with_attempt"]

_NAMED = re.compile(r"-restart-\d+$")


def restarts() -> int:
    """Return how often a launcher has started this rank anew, as far as it tells.

    The torchrun of a node counts those restarts only that its own ranks made necessary.
    """
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(given) if given.isdecimal() and given.isascii() and len(given) < 10 else 0


def launch() -> str | None:
    """Return what no other start of torchrun has: the folder that it made for the errors of its ranks.

    It begins with ``TORCHELASTIC_RUN_ID``, which alone is the same for all jobs that were not given one::

        /tmp/torchelastic_nu3x1w2a/RUN-ID_5y0k3zlm/attempt_0/0/error.json
    """
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts[:-2]
    return folders[-2] if len(folders) > 1 and folders[-1].startswith("attempt_") else None


def with_attempt(name: str, restart: int) -> str:
    """Return the name that a file of a rank has in an attempt; one that says the attempt already stays.

    >>> with_attempt("rank-00001", 2), with_attempt("rank-00001", 0), with_attempt("rank-00001-restart-3", 2)
    ('rank-00001-restart-2', 'rank-00001', 'rank-00001-restart-3')
    """
    return f"{name}-restart-{restart}" if restart and not _NAMED.search(name) else name
