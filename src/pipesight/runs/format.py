"""The format of a run directory, stated once: its version, and the names of its files.

    RUN/run.json                            the run as rank 0 sees it
    RUN/ranks/rank-00001.json               the same facts of each other rank
    RUN/trace/rank-00000.pfw.gz             events of rank 0
    RUN/trace/rank-00000.part2.pfw.gz       their next part
    RUN/trace/rank-00000-4711.pfw.gz        events of process 4711, which rank 0 started
    RUN/stats/rank-00000.jsonl              tensor statistics
    RUN/logs/rank-00000.log                 log lines

`pipesight.runs.reading.attempts` says how the names change when a launcher restarts the ranks.

``run.json`` and the files in ``ranks`` say which ``format`` and ``format_version`` they have. A field may be added
without a new version, since readers ignore fields that they do not know. The version goes up when an older reader would
misread a run. A reader takes every version up to its own; a newer one it reads as far as it can, and `version_note`
becomes a note of the report.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipesight._version import __version__

__all__ = [
    "BARE_TORCH",
    "EVENTS",
    "FORMAT",
    "FORMAT_VERSION",
    "LOGS",
    "NOTES",
    "RANKS",
    "RUN_FILE",
    "STATS",
    "STOPPED",
    "TRACE",
    "TRACE_SUFFIXES",
    "part_order",
    "rank_in",
    "rank_name",
    "split_suffix",
    "version_note",
]

FORMAT, FORMAT_VERSION = "pipesight-run", 1

RUN_FILE = "run.json"
RANKS, TRACE, STATS, LOGS = "ranks", "trace", "stats", "logs"
"""The folders."""
TRACE_SUFFIXES = (".pfw.gz", ".pfw")
STOPPED = "process stopped"
"""An instant of the trace, when the process goes on; its ``microseconds`` say how long it was stopped."""
BARE_TORCH = "torch.distributed.pipelining"
"""What ``run.json`` names as the engine of a pipeline that torch's own schedules run."""
EVENTS, NOTES = "events", "notes.json"
"""Of a Parquet dataset, in place of the traces: see `pipesight.runs.reading._parquet_dataset`."""

_RANK = re.compile(r"rank[-_]?(\d{1,9})")
_PART = re.compile(r"(?P<stem>.+)\.part(?P<number>\d{1,9})")


def version_note(facts: Mapping[str, Any]) -> str | None:
    """Warn of a description whose format this pipesight does not know; ``None`` if it does."""
    written_by, version = facts.get("format", FORMAT), facts.get("format_version", FORMAT_VERSION)
    if written_by != FORMAT:
        return f"not written by pipesight (format: {_short(written_by)}); its contents may be misread"
    if type(version) is int and version <= FORMAT_VERSION:
        return None
    return (
        f"format version {_short(version)}, but pipesight {__version__} knows versions up to {FORMAT_VERSION}; "
        "parts may be misread; upgrade pipesight"
    )


def _short(value: object) -> str:
    return textwrap.shorten(repr(value), 40, placeholder="..")


def rank_name(rank: int) -> str:
    """Return what the files of a rank are called.

    >>> rank_name(1)
    'rank-00001'
    """
    return f"rank-{rank:05}"


def rank_in(name: str) -> int | None:
    """Return the rank that a file's name contains.

    >>> rank_in("rank-00001-restart-2.log"), rank_in("trace.pfw")
    (1, None)
    """
    found = _RANK.search(name)
    return int(found[1]) if found else None


def split_suffix(path: Path, suffixes: Sequence[str] = TRACE_SUFFIXES) -> tuple[str, str]:
    """Split a file's name before its suffix, which is empty if it is none of these."""
    suffix = next((suffix for suffix in suffixes if path.name.endswith(suffix)), "")
    return path.name.removesuffix(suffix), suffix


def part_order(path: Path, suffixes: Sequence[str] = TRACE_SUFFIXES) -> tuple[Path, str, int]:
    """Return the folder, the name without the part, and the number of the part: the order to sort traces in.

    >>> part_order(Path("rank-00000.part2.pfw.gz"))
    (PosixPath('.'), 'rank-00000', 2)
    """
    stem, _ = split_suffix(path, suffixes)
    part = _PART.fullmatch(stem)
    return (path.parent, part["stem"], int(part["number"])) if part else (path.parent, stem, 1)
