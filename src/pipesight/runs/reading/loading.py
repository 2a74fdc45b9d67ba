"""From files to a table of events: what DuckDB can read as it is, it reads; the rest goes through a sieve first."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipesight.runs.reading._decompression import Decompressor
from pipesight.runs.reading._integrity import IntegrityChecks
from pipesight.runs.reading._normalizing import Normalizer
from pipesight.runs.reading._parquet_dataset import EVENTS, check_schema, is_dataset, read_notes
from pipesight.runs.reading.attempts import Attempt, choose, own_restarts
from pipesight.runs.reading.clock_shift import NO_SHIFT, ClockShift
from pipesight.runs.reading.descriptions import complete
from pipesight.runs.reading.duckdb_events import DuckEvents, FileFacts, Source, UnreadableError
from pipesight.runs.reading.safe_open import refusal, without_refused
from pipesight.runs.reading.trace_files import NotARunError, Note, TraceFile, find_files, read_object

if TYPE_CHECKING:
    from pipesight.runs.reading.event_queries import Frame
    from pipesight.runs.reading.event_tables import Column

__all__ = ["Events", "Loaded", "load"]

_BATCH = 2**27  # bytes of files that are read together
_FILES = 128  # and how many, as DuckDB keeps something of each
FORMAT_VERSION = 1
"""The newest format of ``run.json`` that is known."""
MOST_RANKS = 1_000_000
_BAD_LINES = 3  # that a whole file may have: brackets, and one that is being written


class Events(Protocol):
    """A table of events, in some engine."""

    @property
    def frame(self) -> Frame:
        """All of them, as a lazy frame."""

    def fetch(self, query: Frame) -> Mapping[str, Column]:
        """Run a query, and return its columns."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(slots=True)
class Loaded:
    """What there is of a run."""

    events: Events
    description: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    notes: list[Note] = field(default_factory=list)
    records: list[tuple[Path, int]] = field(default_factory=list)
    """Files of others that may hold statistics, and their ranks."""
    checks: IntegrityChecks = field(default_factory=IntegrityChecks)
    attempt: Attempt = field(default_factory=Attempt)
    asked: int | None = None
    """Which attempt was asked for."""
    whole: bool = False
    """Whether it is every event, and not just what a report needs."""


def load(path: Path, *, engine: object = "duckdb", attempt: int | None = None, whole: bool = False) -> Loaded:
    """Read a run's events into DuckDB, or have an engine read those of a dataset.

    Args:
        path: a run directory, a folder, a file or a dataset.
        engine: as for `open_run`.
        attempt: which one to read.
        whole: take every event, with all that it says, and not just what a report needs.

    Raises:
        NotARunError: there is nothing to be found, or not as the engine needs it.
        ValueError: there is no such attempt.
    """
    if not path.is_dir() and not path.is_file():
        what = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise NotARunError(f"{what}: {str(path)!r}; give a run directory, or a trace such as trace.pfw.gz")
    if is_dataset(path):
        return _open_dataset(path, engine, attempt)
    if engine != "duckdb":
        raise NotARunError(
            f"no dataset for an engine other than DuckDB in {str(path)!r}; make one: "
            f"pipesight convert {shlex.quote(str(path))} --to parquet"
        )
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
    """Import what queries and their results need, while DuckDB reads and does not need the interpreter."""
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
    description, _, _, apart = _describe(path, notes)
    attempt = choose(path, (), asked=asked, description=description, apart=apart)
    events: Events = DuckEvents.of_parquet(path / EVENTS) if engine == "duckdb" else events_in(engine, path)
    try:
        count = event_queries.count(events.frame, events.fetch)
    except BaseException:
        events.close()
        raise
    return Loaded(events, description, count, notes, attempt=attempt)


def _load(path: Path, loaded: Loaded, events: DuckEvents, asked: int | None) -> None:
    description, processes, shifts, apart = _describe(path, loaded.notes)
    size = description.get("world_size")
    found, notes, loaded.attempt = find_files(
        path,
        processes,
        size if isinstance(size, int) and size > 0 else None,
        choose=lambda there: choose(path, there, asked=asked, description=description, apart=apart),
    )
    loaded.notes += notes
    if description and (missing := _missing(found, size)) is not None:
        loaded.notes.append(Note(path, missing))
    loaded.description = loaded.attempt.about(description)
    if shifts and not loaded.attempt.described:
        loaded.notes.append(Note(path / "run.json", "clocks of ranks were compared in another attempt than this one"))
    loaded.records += [(file.path, file.rank) for file in found if file.form == "records"]
    direct: list[tuple[int, TraceFile]] = []
    sieved: dict[int, Normalizer] = {}
    for number, file in enumerate(found):
        if file.form == "lines":
            direct.append((number, file))
        else:
            sieved[number] = Normalizer(file)
    loaded.checks.check_small([file.path for _, file in direct])
    for batch in _batches(direct):
        kept = []
        for number, file in batch:
            if loaded.checks.has_found_damage(file.path):
                sieved[number] = Normalizer(file)
            else:
                kept.append((number, file))
        sieved |= {number: Normalizer(file) for number, file in _unread(events, kept, shifts)}
    for number, sieve in sorted(sieved.items()):
        sieve.read_into(events, number, shifts.get(sieve.file.rank, NO_SHIFT))
    if foreign := [number for number, sieve in sieved.items() if sieve.file.form != "lines"]:
        events.adopt(foreign)
    facts = events.settle()
    again = {
        number: Normalizer(file)
        for number, file in direct
        if number not in sieved
        and number in facts
        and facts[number].damaged > _BAD_LINES
        and loaded.checks.has_found_damage(file.path, check=True)
    }
    for number, sieve in again.items():
        events.remove(number)
        sieve.read_into(events, number, shifts.get(sieve.file.rank, NO_SHIFT))
    if again:
        facts |= {number: fact for number, fact in events.settle().items() if number in again}
        sieved |= again
    loaded.count = sum(fact.spans for fact in facts.values())
    for number, file in enumerate(found):
        _tell(loaded, file, facts.get(number, FileFacts(0, 0, False)), sieved.get(number))
    loaded.checks.begin()
    if not loaded.count and not loaded.description and not loaded.records and not _has_lines(path):
        raise NotARunError(_nothing(path, loaded.notes))


def _describe(
    path: Path, notes: list[Note]
) -> tuple[dict[str, Any], dict[int, int], dict[int, ClockShift], dict[int, int]]:
    """Return what ``run.json`` says, the ranks of processes, what to add to the times of ranks, and `own_restarts`."""
    description: dict[str, Any] = {}
    processes: dict[int, int] = {}
    shifts: dict[int, ClockShift] = {}
    by_rank: dict[int, dict[str, Any]] = {}
    if not path.is_dir():
        return description, processes, shifts, {}
    if (why := refusal(path / "run.json", path)) is not None:
        raise NotARunError(f"{path / 'run.json'}: {why}")

    def refuse(file: Path, why: str) -> None:
        notes.append(Note(file, why))

    for pattern in ("stats/*.jsonl", "logs/*.log"):  # which are read later, or not at all
        without_refused(sorted(path.glob(pattern)), path, refuse)
    for file in [path / "run.json", *without_refused(sorted(path.glob("ranks/*.json")), path, refuse)]:
        try:
            facts = read_object(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            notes.append(Note(file, f"left out: {error}"))
            continue
        if (news := _unknown(facts)) is not None:
            notes.append(Note(file, news))
        if file.name == "run.json":
            description = facts
        else:
            complete(description, facts)
        rank, pid = facts.get("rank"), facts.get("pid")
        if isinstance(rank, int) and isinstance(pid, int):
            processes[pid] = rank
        if isinstance(rank, int) and (shift := ClockShift.of(facts)) is not None:
            shifts[rank] = shift
        if isinstance(rank, int):
            by_rank[rank] = facts
    return description, processes, shifts, own_restarts(description, by_rank)


def _unknown(facts: Mapping[str, Any]) -> str | None:
    """Say that a description is of another format than the one that is known here, if it is."""
    version = facts.get("format_version", FORMAT_VERSION)
    if type(version) is int and version <= FORMAT_VERSION:
        return None
    told = textwrap.shorten(repr(version), 40, placeholder="..")
    return f"of format version {told}, and {FORMAT_VERSION} is known here: some of it may be misread"


def _missing(found: Sequence[TraceFile], size: object) -> str | None:
    """Say of which ranks there is no trace, if there should be one."""
    there = {file.rank for file in found}
    if not there:
        return "there is no trace in it"
    if type(size) is not int or len(there) >= size:
        return None
    missing = [rank for rank in range(min(size, MOST_RANKS)) if rank not in there]
    shown = ", ".join(map(str, missing[:8])) + (", .." if len(missing) > 8 else "")
    return f"there is no trace of rank{'s' * (len(missing) != 1)} {shown} of {size:,}"


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
    """Read files together, or else one by one, and yield those that cannot be read as they are."""
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


# What to say.


def _tell(loaded: Loaded, file: TraceFile, facts: FileFacts, sieve: Normalizer | None) -> None:
    """Note what is wrong with a file, now, or once it has been checked."""

    def look(text: Decompressor) -> Iterator[Note]:
        yield from _notes(file, facts, sieve, text, whole=loaded.whole)

    if sieve is not None:
        loaded.notes.extend(look(sieve.unpacker))
    else:
        loaded.checks.when_done(file.path, lambda text: loaded.notes.extend(look(text)))


def _notes(
    file: TraceFile, facts: FileFacts, sieve: Normalizer | None, text: Decompressor, *, whole: bool
) -> Iterator[Note]:
    def note(words: str) -> Note:
        return Note(file.path, words)

    if sieve is not None and sieve.failure is not None:
        yield note(f"cannot be read on: {sieve.failure}")
    if text.damaged:
        wrong = text.unchecked or sieve is None
        yield note(
            f"damaged: {text.damaged:,} of its bytes fail their checksum; "
            + ("some of what it says may be wrong" if wrong else "what they held is left out")
        )
    if facts.lost:
        yield note(f"without {facts.lost:,} {'event' if facts.lost == 1 else 'events'} that were lost while recording")
    if file.form == "lines":
        last = text.tail.rstrip(b"\0 \t\r\n")
        is_broken_off = not text.tail.endswith((b"\n", b"]", b"}")) and sieve is None
        if not facts.ended and not last.endswith(b"]") and not text.damaged:
            yield note("without an end: its process was killed, or is still writing")
        # Brackets, a last line that was cut off, and where bytes are missing, the lines on both sides.
        expected = file.bracketed + last.endswith(b"]") + is_broken_off + (2 if text.damaged else 0)
    else:
        expected = 0
        if text.cut or (sieve is not None and sieve.is_broken_off and facts.spans):
            yield note("without an end: it was cut off")
    skipped = facts.damaged + (sieve.skipped if sieve is not None else 0) - expected
    if skipped > 0:
        yield note(f"left out: {skipped:,} {'line that is no event' if skipped == 1 else 'lines that are no events'}")
    if not facts.spans and file.form != "records":
        yield note("there are no spans in it")
    if whole and text.has_surrogates:
        yield note("half characters, which are no Unicode, are replaced by \ufffd")


def _has_lines(path: Path) -> bool:
    return any(next((path / name).glob("*"), None) is not None for name in ("stats", "logs") if (path / name).is_dir())


def _nothing(path: Path, notes: Sequence[Note]) -> str:
    more = f"; and {len(notes) - 1} more" if len(notes) > 1 else ""
    why = f" ({notes[0].path.name}: {notes[0].text}{more})" if notes else ""
    return f"no events in {str(path)!r}{why}; give a run directory, or a trace such as trace.pfw.gz"
