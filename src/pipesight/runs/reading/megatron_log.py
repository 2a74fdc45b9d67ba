"""Read what Megatron-LM prints while it trains: a line for every so many iterations, and its timers.

A line has means over the iterations since the line before; timers follow it, by ``--timing-log-option``::

     [2026-11-02 10:00:20.000000] iteration       20/     100 | ... | elapsed time per iteration (ms): 950.0 | ...
    (min, max) time across ranks (ms):
        forward-backward ...............................: (800.00, 850.00)

Other lines, and what a launcher puts before each, do not matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from pipesight._plurals import count_of
from pipesight.runs.reading._decompression import Decompressor
from pipesight.runs.reading._file_type import sniff

__all__ = ["ELAPSED", "LoggedIteration", "TrainingLog", "is_training_log", "parse_training_log", "read_training_log"]

ELAPSED = "elapsed time per iteration (ms)"
"""The name of the value that every line has."""

_SEARCHED = 2**26  # bytes before the first line: every rank may print its arguments and warnings
_LONGEST_ITERATION = 1e12  # milliseconds
_LONGEST = 2**16  # bytes of a line
_TIMED = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?)\]$")
_NUMBER = re.compile(r" {0,20}(\d{1,18})/ {0,20}\d{1,18} \|")
_HEAD = re.compile(r"(?:^|[\s:)])(?:max time|times|time) across ranks \(ms\):\s*$")
_TIME = r"\d{1,15}\.\d{1,9}"
_SPREAD = re.compile(rf"    (?P<name>\S+) \.*: (?:\((?P<least>{_TIME}), (?P<most>{_TIME})\)|(?P<only>{_TIME}))\s*$")
_NAME = re.compile(r"  (?P<name>\S+):\s*$")
_RANK = re.compile(rf"     rank +\d{{1,9}}: (?P<value>{_TIME})\s*$")
_APART = ("save-checkpoint", "load-checkpoint", "evaluate", "eval-time", "gpu-sniff-test")
"""Beginnings of the names of timers that are logged when they run, not for each iteration."""

Spread = tuple[float | None, float]
"""The least and the most over the ranks that ran a timer, in milliseconds; the least is not always logged."""


@dataclass(slots=True)
class LoggedIteration:
    """A line of the log, and the timers that follow it."""

    number: int
    """The last iteration that it is about."""
    time: datetime | None
    """When it was written, in a time zone that the log does not name."""
    values: dict[str, float]
    """What it says, by name: means over the iterations since the line before, and counts."""
    is_first: bool = False
    """Whether it is the first since the program started."""
    timers: dict[str, Spread] = field(default_factory=dict)
    """Per iteration."""
    apart: list[tuple[str, Spread]] = field(default_factory=list)
    """Timers of what was done after it, outside iterations: each name, and what it took."""


@dataclass(slots=True)
class TrainingLog:
    """The iterations since the last start of the program."""

    iterations: list[LoggedIteration] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out."""


def is_training_log(path: Path) -> bool:
    """Return whether a file is text with a line of an iteration."""
    if not path.is_file() or sniff(path).form not in ("other", "records"):
        return False
    return any(_iteration(line) is not None for line in _lines(path, _SEARCHED))


def read_training_log(path: Path) -> TrainingLog:
    """Read a log that `is_training_log` accepts."""
    return parse_training_log(_lines(path))


def parse_training_log(lines: Iterable[str]) -> TrainingLog:
    """Read the lines of a log; an iteration number that does not rise is that of a restarted program."""
    log = TrainingLog()
    starts, unread, blocks, name = 1, 0, 0, ""
    block: dict[str, Spread] = {}
    for line in lines:
        if (entry := _iteration(line)) is not None:
            _settle(log, block, follows=blocks == 1)
            block, blocks = {}, 0
            if not 0 < entry.values.get(ELAPSED, 0.0) < _LONGEST_ITERATION:
                unread, blocks = unread + 1, 2  # timers that follow are not those of the line before
                continue
            if log.iterations and entry.number <= log.iterations[-1].number:
                starts, log.iterations = starts + 1, []
            entry.is_first = not log.iterations
            log.iterations.append(entry)
        elif _HEAD.search(line):
            _settle(log, block, follows=blocks == 1)
            block, blocks, name = {}, blocks + 1, ""
        elif blocks and (found := _SPREAD.search(line)) is not None:
            least = None if found["least"] is None else float(found["least"])
            block[found["name"]] = least, float(found["only"] or found["most"])
        elif name and (found := _RANK.search(line)) is not None:
            value = float(found["value"])
            least, most = block.get(name, (value, value))
            block[name] = value if least is None else min(least, value), max(most, value)
        elif blocks and (found := _NAME.search(line)) is not None:
            name = found["name"]
    _settle(log, block, follows=blocks == 1)
    if starts > 1:
        log.notes.append(f"the program started {starts} times; only iterations since the last start are shown")
    if unread:
        log.notes.append(f"skipped: {count_of(unread, 'line')} of iterations without a time")
    return log


def _iteration(line: str) -> LoggedIteration | None:
    """Return what the line of an iteration says, its values unchecked; ``None`` of any other line."""
    if ELAPSED not in line:
        return None
    before, _, rest = line.partition(" iteration ")
    number = _NUMBER.match(rest)
    if number is None or "{" in before:
        return None
    timed = _TIMED.search(before[-28:])
    return LoggedIteration(int(number[1]), _moment(timed and timed[1]), _values(rest[number.end() :]))


def _settle(log: TrainingLog, block: dict[str, Spread], *, follows: bool) -> None:
    """Keep the timers of a block; ``follows``: it is the first after the line of an iteration."""
    for name, spread in block.items() if log.iterations else ():
        if name.startswith(_APART):
            log.iterations[-1].apart.append((name, spread))
        elif follows:
            log.iterations[-1].timers[name] = spread


def _values(text: str) -> dict[str, float]:
    """Return the numbers of a line, by name."""
    found = {}
    for entry in text.split("|"):
        name, _, value = entry.strip().rpartition(": ")
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found


def _moment(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None


def _lines(path: Path, most: float = math.inf) -> Iterator[str]:
    """Yield the lines in the first bytes of a file, each cut off at a length that none of ours has."""
    rest = b""
    for text in Decompressor(path):
        most -= len(text)
        *lines, last = text.split(b"\n")
        if lines:
            yield _decoded(rest + lines[0])
            yield from map(_decoded, lines[1:])
            rest = b""
        rest = (rest + last)[:_LONGEST]
        if most <= 0:
            return
    yield _decoded(rest)


def _decoded(line: bytes) -> str:
    return line[:_LONGEST].decode(errors="replace").rstrip("\r")
