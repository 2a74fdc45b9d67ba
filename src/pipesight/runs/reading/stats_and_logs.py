"""Read the statistics and log lines of a run, one after the other."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipesight._plurals import count_of, plural
from pipesight.runs.format import rank_in
from pipesight.runs.reading._decompression import Decompressor
from pipesight.runs.reading._foreign_formats import records, statistics_of
from pipesight.runs.reading.attempts import Attempt
from pipesight.runs.reading.reader_notes import Note
from pipesight.runs.reading.safe_open import open_plain, without_refused

__all__ = [
    "NONFINITE_KEYS",
    "LogLine",
    "foreign_statistics",
    "is_nonfinite",
    "log_lines",
    "measured_steps",
    "parse_log",
    "statistics",
]

NONFINITE_KEYS = ("nonfinite", "nans", "infs")
"""Keys that mark a line of statistics about a tensor that is not finite."""

_LONGEST = 2**20  # characters of a line
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?) "
    r"(?P<level>[A-Za-z]+) (?P<logger>\S+) (?:\[(?P<where>[^\]]*)\] ?)?(?P<message>.*)",
    re.DOTALL,
)
_MEASURED = re.compile(r'\{"iteration": (\d{1,18}), "layer": "(?:[^"\\]|\\.)*", "tensor": "[^"]')
_WHERE = re.compile(
    r"(?:step (?P<step>\d+) ?)?(?:partition (?P<partition>\d+) ?)?(?:micro-batch (?P<microbatch>\d+) ?)?"
    r"(?P<phase>forward|recompute|backward|weight)? ?(?:layer (?P<layer>.*))?"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log line, and where in the pipeline it was logged, as far as the line says."""

    rank: int
    time: int | None
    """Microseconds, like the times of events; a line without a time zone is in that of this machine."""
    level: str
    logger: str
    message: str
    step: int | None = None
    partition: int | None = None
    microbatch: int | None = None
    phase: str | None = None
    layer: str | None = None


def statistics(
    folder: Path, note: Callable[[Note], None], *, words: Sequence[str] = (), attempt: Attempt
) -> Iterator[dict[str, Any]]:
    """Yield the lines of statistics in a folder that belong to an attempt, each with its rank.

    Given ``words``, only lines that contain one of them are parsed.
    """
    for path, rank in _ranked(folder, ".jsonl"):
        if attempt.restarts and not attempt.has_statistics(path):
            continue
        skipped = 0
        for line in _lines(path, note):
            if words and line.startswith("{") and line.endswith("}\n") and not any(word in line for word in words):
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield {"rank": rank, **value}
            else:
                skipped += bool(line.strip("\0 \r\n\t"))
        if skipped:
            are = plural(skipped, "is no JSON object", "are no JSON objects")
            note(Note(path, f"skipped: {count_of(skipped, 'line')} that {are}"))


def measured_steps(folder: Path, *, attempt: Attempt) -> set[int]:
    """Return the steps in which tensors were measured; `statistics` notes what cannot be read."""
    files = [path for path, _ in _ranked(folder, ".jsonl") if not attempt.restarts or attempt.has_statistics(path)]
    found = (_MEASURED.match(line) for path in files for line in _lines(path, lambda note: None))
    return {int(match[1]) for match in found if match is not None}


def foreign_statistics(path: Path, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the numbers in a file of JSON lines of another tool, as lines of statistics."""
    rest = b""
    for text in Decompressor(path):
        *lines, rest = (rest[-_LONGEST:] + text).split(b"\n")
        for record in records(lines):
            yield from ({"rank": rank, **line} for line in statistics_of(record))
    for record in records([rest]):
        yield from ({"rank": rank, **line} for line in statistics_of(record))


def is_nonfinite(line: Mapping[str, Any]) -> bool:
    """Return whether the tensor is not finite, or the value of a line without a tensor.

    A statistic alone may be undefined, for example that of an empty tensor.
    """
    return bool(line.get("nans") or line.get("infs") or ("nonfinite" in line and not line.get("tensor")))


def log_lines(folder: Path, note: Callable[[Note], None], *, attempt: Attempt) -> Iterator[LogLine]:
    """Yield the log lines in a folder that belong to an attempt."""
    for path, rank in _ranked(folder, ".log"):
        if not attempt.restarts or attempt.has_log(path, rank):
            yield from parse_log(_lines(path, note), rank)


def parse_log(texts: Iterable[str], rank: int) -> Iterator[LogLine]:
    """Yield the lines of a log; a line without a time continues the one before."""
    last: LogLine | None = None
    for text in texts:
        line = text.rstrip("\r\n\0")
        match = _LINE.fullmatch(line)
        if match is None and last is not None:
            if len(last.message) < _LONGEST:
                last = replace(last, message=f"{last.message}\n{line}")
            continue
        if last is not None:
            yield last
        last = _parsed(rank, match) if match else LogLine(rank, None, "", "", line) if line else None
    if last is not None:
        yield last


def _parsed(rank: int, match: re.Match[str]) -> LogLine:
    where = _WHERE.fullmatch(match["where"] or "")
    message = match["message"]
    if where is None:  # brackets of the message itself
        message = f"[{match['where']}] {message}"
    numbers = {
        name: int(where[name]) if where and where[name] else None for name in ("step", "partition", "microbatch")
    }
    return LogLine(
        rank,
        _microseconds(match["time"]),
        match["level"].upper(),
        match["logger"],
        message,
        **numbers,
        phase=where["phase"] if where else None,
        layer=where["layer"] if where else None,
    )


def _microseconds(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text.replace(",", "."))
        whole = int(moment.replace(microsecond=0).timestamp())
    except (ValueError, OverflowError, OSError):
        return None
    return whole * 1_000_000 + moment.microsecond


def _ranked(folder: Path, suffix: str) -> Iterator[tuple[Path, int]]:
    found = without_refused(sorted(folder.glob(f"*{suffix}")), folder.parent)  # `load` has noted the others
    for number, path in enumerate(found):
        rank = rank_in(path.name)
        yield path, number if rank is None else rank


def _lines(path: Path, note: Callable[[Note], None]) -> Iterator[str]:
    """Yield lines, cut at a length that no real line has."""
    try:
        with io.TextIOWrapper(open_plain(path), encoding="utf-8", errors="replace", newline="\n") as file:
            while line := file.readline(_LONGEST):
                yield line
                while line and not line.endswith("\n"):
                    line = file.readline(_LONGEST)
    except OSError as error:
        note(Note(path, f"skipped: {error.strerror or error}"))
