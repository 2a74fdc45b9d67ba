"""Log lines for the page: the program's before pipesight's own for each task, which the page shows on demand.

Where there is no room for all, those of shown steps and warnings come first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from pipesight.runs.reading.run import LogLine

__all__ = ["logs_of"]

LOUD = ("WARNING", "ERROR", "CRITICAL")
TASKS = "pipesight.pipeline"
"""The logger of a line for each task and each layer."""
LONGEST = 2_000  # characters of a line


def logs_of(lines: Iterable[LogLine], *, steps: Collection[int], begin: int, most: int) -> dict[str, Any]:
    """Return the lines, and how many did not fit.

    Times count from ``begin``; there is room for ``most`` lines.
    """
    shown = {*steps}
    wanted: list[tuple[int, LogLine]] = []
    others: list[tuple[int, LogLine]] = []
    tasks: list[tuple[int, LogLine]] = []
    count = 0
    for line in lines:
        kept = others
        if line.logger == TASKS and line.level not in LOUD:
            kept = tasks
        elif line.step in shown or line.level in LOUD:
            kept = wanted
        if len(kept) < most:
            kept.append((count, line))
        count += 1
    chosen = sorted((wanted + others + tasks)[:most], key=lambda entry: (entry[1].time or 0, entry[0]))
    return {"lines": [_line(line, begin) for _, line in chosen], "left_out": count - len(chosen)}


def _line(line: LogLine, begin: int) -> dict[str, Any]:
    return {
        "time": None if line.time is None else line.time - begin,
        "level": line.level,
        "logger": line.logger,
        "own": line.logger != TASKS,
        "text": line.message if len(line.message) <= LONGEST else f"{line.message[:LONGEST]}…",
        "rank": line.rank,
        "step": line.step,
        "partition": line.partition,
        "microbatch": line.microbatch,
        "phase": line.phase,
        "layer": line.layer,
    }
