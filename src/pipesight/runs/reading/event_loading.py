"""From files to a table of events: DuckDB reads what it can, the rest is normalized first."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipesight.runs.format import EVENTS, LOGS, RUN_FILE, STATS
from pipesight.runs.reading._checksums import IntegrityChecks
from pipesight.runs.reading._decompression import Decompressor
from pipesight.runs.reading._file_conversion import Normalizer
from pipesight.runs.reading._file_notes import file_notes, missing_ranks, nothing_found
from pipesight.runs.reading._parquet_dataset import check_schema, is_dataset, read_notes
from pipesight.runs.reading.attempts import Attempt, choose, own_restarts
from pipesight.runs.reading.clock_shift import NO_SHIFT, ClockShift
from pipesight.runs.reading.descriptions import (
    folder_of_runs,
    merged,
    processes_of,
    read_description,
    read_ranks,
    runs_inside,
    shifts_of,
)
from pipesight.runs.reading.duckdb_events import DuckEvents, FileFacts, Source, UnreadableError
from pipesight.runs.reading.megatron_log import TrainingLog, is_training_log, read_training_log
from pipesight.runs.reading.operation_trace import is_parquet, read_operations
from pipesight.runs.reading.reader_notes import NotARunError, Note
from pipesight.runs.reading.safe_open import refusal, without_refused
from pipesight.runs.reading.trace_files import TraceFile, find_files

if TYPE_CHECKING:
    from pipesight.runs.reading.event_queries import Frame
    from pipesight.runs.reading.event_tables import Column, Operations

__all__ = ["Events", "Loaded", "load"]

_BATCH = 2**27  # bytes of files that are read together
_FILES = 128  # and how many, since DuckDB keeps a buffer for each
_BAD_LINES = 3  # that an intact file may have: brackets, and one that is being written


class Events(Protocol):
    """A table of events in an engine."""

    @property
    def frame(self) -> Frame:
        """All events, as a lazy frame."""

    def fetch(self, query: Frame) -> Mapping[str, Column]:
        """Run a query, and return its columns."""

    def close(self) -> None:
        """Close the engine, if it is ours."""


@dataclass(slots=True)
class Loaded:
    """The events of a run, and what else is known of it."""

    events: Events
    description: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    notes: list[Note] = field(default_factory=list)
    records: list[tuple[Path, int]] = field(default_factory=list)
    """Files of other tools that may hold statistics, and their ranks."""
    checks: IntegrityChecks = field(default_factory=IntegrityChecks)
    attempt: Attempt = field(default_factory=Attempt)
    asked: int | None = None
    """Which attempt was asked for."""
    whole: bool = False
    """Whether every event was read, not just what a report needs."""
    operations: Operations | None = None
    """Of a trace of operations, which has no events."""
    log: TrainingLog | None = None
    """Of a training log of Megatron-LM, which has none either."""


def load(path: Path, *, engine: object = "duckdb", attempt: int | None = None, whole: bool = False) -> Loaded:
    """Read a run's events into DuckDB, or open a dataset in an engine.

    ``engine`` is as for `open_run`. ``whole`` reads every event with all its fields, not just what a report needs.

    Raises:
        NotARunError: nothing was found, or the engine needs a dataset.
        ValueError: there is no such attempt.
    """
    if not path.is_dir() and not path.is_file():
        what = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise NotARunError(f"{what}: {str(path)!r}; give a run directory, or a trace such as trace.pfw.gz")
    if inside := runs_inside(path):
        raise NotARunError(folder_of_runs(path, inside))
    if is_dataset(path):
        return _open_dataset(path, engine, attempt)
    if engine != "duckdb":
        raise NotARunError(
            f"engines other than DuckDB need a dataset, and {str(path)!r} is not one; make one: "
            f"pipesight convert {shlex.quote(str(path))} --to parquet"
        )
    if is_parquet(path):
        return _open_operations(path, attempt)
    if is_training_log(path):
        return _open_log(path, attempt)
    events = DuckEvents(whole=whole)
    loaded = Loaded(events, asked=attempt, whole=whole)
    meanwhile = threading.Thread(target=_import_rest)
    meanwhile.start()
    try:
        _load(path, loaded, events, attempt)
    except BaseException:
        loaded.checks.stop()
        events.close()
        raise
    finally:
        meanwhile.join()
    return loaded


def _import_rest() -> None:
    """Import what queries need while DuckDB reads without holding the interpreter."""
    importlib.import_module("pipesight.runs.reading.event_queries")
    importlib.import_module("numpy.ma")


def _open_dataset(path: Path, engine: object, asked: int | None) -> Loaded:
    from pipesight.runs.reading import event_queries
    from pipesight.runs.reading._dask_spark import events_in

    for file in (path / EVENTS).rglob("*"):
        if not file.is_dir() and (why := refusal(file, path)) is not None:
            raise NotARunError(f"{file}: {why}")
    check_schema(path)
    notes = read_notes(path)
    own, ranks = _describe(path, notes)
    attempt = choose(path, (), asked=asked, description=own, apart=own_restarts(own, ranks))
    events: Events = DuckEvents.of_parquet(path / EVENTS) if engine == "duckdb" else events_in(engine, path)
    try:
        count = event_queries.count(events.frame, events.fetch)
    except BaseException:
        events.close()
        raise
    return Loaded(events, merged(own, ranks), count, notes, attempt=attempt)


def _open_operations(path: Path, asked: int | None) -> Loaded:
    operations = read_operations(path)
    _refuse_attempt(path, asked)
    return Loaded(DuckEvents(), count=len(operations), operations=operations)


def _open_log(path: Path, asked: int | None) -> Loaded:
    _refuse_attempt(path, asked)
    log = read_training_log(path)
    if not log.iterations:
        raise NotARunError(f"no iteration has a time in {str(path)!r}")
    return Loaded(DuckEvents(), notes=[Note(path, text) for text in log.notes], log=log)


def _refuse_attempt(path: Path, asked: int | None) -> None:
    """Refuse an attempt that a file without a run directory cannot have."""
    if asked not in (None, 0):
        raise ValueError(f"there is no attempt {asked} in {str(path)!r} (attempts: 0)")


def _load(path: Path, loaded: Loaded, events: DuckEvents, asked: int | None) -> None:
    own, ranks = _describe(path, loaded.notes)
    shifts, apart = shifts_of(own, ranks), own_restarts(own, ranks)
    size = own.get("world_size")
    found, notes, loaded.attempt = find_files(
        path,
        processes_of(own, ranks),
        size if isinstance(size, int) and size > 0 else None,
        choose=lambda there: choose(path, there, asked=asked, description=own, apart=apart),
    )
    loaded.notes += notes
    if (own or ranks) and (missing := missing_ranks({file.rank for file in found}, size)) is not None:
        loaded.notes.append(Note(path, missing))
    loaded.description = loaded.attempt.about(merged(own, ranks))
    if shifts and not loaded.attempt.described:
        loaded.notes.append(Note(path / RUN_FILE, "the clocks of the ranks were compared in another attempt"))
    loaded.records += [(file.path, file.rank) for file in found if file.form == "records"]
    direct: list[tuple[int, TraceFile]] = []
    slow: dict[int, Normalizer] = {}
    for number, file in enumerate(found):
        if file.form == "lines":
            direct.append((number, file))
        else:
            slow[number] = Normalizer(file)
    loaded.checks.check_small([file.path for _, file in direct])
    for batch in _batches(direct):
        kept = []
        for number, file in batch:
            if loaded.checks.has_found_damage(file.path):
                slow[number] = Normalizer(file)
            else:
                kept.append((number, file))
        slow |= {number: Normalizer(file) for number, file in _unread(events, kept, shifts)}
    for number, one in sorted(slow.items()):
        one.read_into(events, number, shifts.get(one.file.rank, NO_SHIFT))
    if foreign := {number: one.place for number, one in slow.items() if one.file.form != "lines"}:
        loaded.notes += [Note(found[number].path, text) for number, text in events.adopt(foreign).items()]
    facts = events.settle()
    again = {
        number: Normalizer(file)
        for number, file in direct
        if number not in slow
        and number in facts
        and facts[number].damaged > _BAD_LINES
        and loaded.checks.has_found_damage(file.path, check=True)
    }
    for number, one in again.items():
        events.remove(number)
        one.read_into(events, number, shifts.get(one.file.rank, NO_SHIFT))
    if again:
        facts |= {number: fact for number, fact in events.settle().items() if number in again}
        slow |= again
    loaded.count = sum(fact.spans for fact in facts.values())
    for number, file in enumerate(found):
        _note(loaded, file, facts.get(number, FileFacts(0, 0, False)), slow.get(number))
    loaded.checks.begin()
    if not loaded.count and not loaded.description and not loaded.records and not _has_lines(path):
        raise NotARunError(nothing_found(path, loaded.notes))


def _describe(path: Path, notes: list[Note]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return what ``run.json`` says, and what the other ranks say."""
    if not path.is_dir():
        return {}, {}
    if (why := refusal(path / RUN_FILE, path)) is not None:
        raise NotARunError(f"{path / RUN_FILE}: {why}")

    def note(file: Path, text: str) -> None:
        notes.append(Note(file, text))

    for folder, suffix in ((STATS, "*.jsonl"), (LOGS, "*.log")):  # they are read later, or not at all
        without_refused(sorted((path / folder).glob(suffix)), path, note)
    own: dict[str, Any] = {}
    try:
        own = read_description(path, note)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        note(path / RUN_FILE, f"skipped: {error}")
    return own, read_ranks(path, note)


def _batches(files: Sequence[tuple[int, TraceFile]]) -> Iterator[list[tuple[int, TraceFile]]]:
    batch: list[tuple[int, TraceFile]] = []
    size = 0
    for number, file in files:
        batch.append((number, file))
        with contextlib.suppress(OSError):
            size += file.path.stat().st_size
        if size > _BATCH or len(batch) >= _FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _unread(
    events: DuckEvents, files: Sequence[tuple[int, TraceFile]], shifts: dict[int, ClockShift]
) -> Iterator[tuple[int, TraceFile]]:
    """Read files together or, if that fails, one by one; yield those that DuckDB cannot read."""
    if not files:
        return
    sources = [
        Source(file.path, number, file.rank, own=file.own, packed=file.packed, shift=shifts.get(file.rank, NO_SHIFT))
        for number, file in files
    ]
    try:
        events.read(sources)
    except UnreadableError:
        if len(files) == 1:
            yield files[0]
        else:
            for one in files:
                yield from _unread(events, [one], shifts)


def _note(loaded: Loaded, file: TraceFile, facts: FileFacts, normalized: Normalizer | None) -> None:
    """Note what is wrong with a file: now, or once its checksums have been verified."""

    def add(text: Decompressor) -> None:
        loaded.notes.extend(file_notes(file, facts, normalized, text, whole=loaded.whole))

    if normalized is not None:
        add(normalized.unpacker)
    else:
        loaded.checks.when_done(file.path, add)


def _has_lines(path: Path) -> bool:
    return any(next((path / name).glob("*"), None) is not None for name in (STATS, LOGS) if (path / name).is_dir())
