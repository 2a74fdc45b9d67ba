"""Log lines for the page: those of shown steps and warnings first, where there is no room for all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from pipesight.runs.reading.run import LogLine

__all__ = ["logs_of"]

LOUD = ("WARNING", "ERROR", "CRITICAL")
LONGEST = 2_000  # characters of a line


def logs_of(lines: Iterable[LogLine], *, steps: Collection[int], begin: int, most: int) -> dict[str, Any]:
    """Return the lines, and how many did not fit.

    Args:
        lines: All of them.
        steps: The numbers of the steps that are shown.
        begin: When the run began; times count from there.
        most: How many lines there is room for.
    """
    shown = {*steps}
    wanted: list[tuple[int, LogLine]] = []
    others: list[tuple[int, LogLine]] = []
    count = 0
    for line in lines:
        kept = wanted if line.step in shown or line.level in LOUD else others
        if len(kept) < most:
            kept.append((count, line))
        count += 1
    chosen = sorted((wanted + others)[:most], key=lambda entry: (entry[1].time or 0, entry[0]))
    return {"lines": [_line(line, begin) for _, line in chosen], "left_out": count - len(chosen)}


def _line(line: LogLine, begin: int) -> dict[str, Any]:
    return {
        "time": None if line.time is None else line.time - begin,
        "level": line.level,
        "logger": line.logger,
        "text": line.message if len(line.message) <= LONGEST else f"{line.message[:LONGEST]}…",
        "rank": line.rank,
        "step": line.step,
        "partition": line.partition,
        "microbatch": line.microbatch,
        "phase": line.phase,
        "layer": line.layer,
    }
