"""A run as a dataset: all its events in Parquet, one or more files per rank, next to its other files.

    DATASET/events/rank-00000-0.parquet         every event with all its fields; nothing else is in this folder
    DATASET/run.json, ranks, stats, logs        as they were
    DATASET/notes.json                          notes on the files that the events were read from

Such a folder can be read like a run. Those too large for one machine are read by a cluster: see `_dask_spark`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipesight.runs.format import EVENTS, LOGS, NOTES, RANKS, RUN_FILE, STATS, rank_name
from pipesight.runs.reading.reader_notes import NotARunError, Note
from pipesight.runs.reading.safe_open import check_plain, open_plain, refusal
from pipesight.runs.reading.stats_and_logs import foreign_statistics

if TYPE_CHECKING:
    from pipesight.runs.reading.duckdb_events import DuckEvents

__all__ = ["check_schema", "is_dataset", "read_notes", "write_dataset"]

_BESIDE = (RUN_FILE, RANKS, STATS, LOGS)


def is_dataset(path: Path) -> bool:
    """Return whether a folder is a dataset."""
    return (path / EVENTS).is_dir() and next((path / EVENTS).rglob("*.parquet"), None) is not None


def check_schema(path: Path) -> None:
    """Raise `NotARunError` if the columns of a dataset are not those of this version, or cannot be read."""
    from pipesight.runs.reading._duckdb_sql import SCHEMA
    from pipesight.runs.reading.duckdb_events import schema_of

    found = schema_of(next(iter(sorted((path / EVENTS).rglob("*.parquet")))))
    if found != SCHEMA:
        raise NotARunError(
            f"the dataset was written by another version of pipesight: {str(path)!r} (its schema: {found}, expected: "
            f"{SCHEMA}); convert the run again: pipesight convert RUN --to parquet"
        )


def write_dataset(
    events: DuckEvents,
    notes: Sequence[Note],
    *,
    source: Path,
    target: Path,
    records: Sequence[tuple[Path, int]] = (),
) -> int:
    """Write a dataset; the folder gets its name, and replaces an older dataset, once it is complete.

    Returns the number of events, spans and others.

    ``source`` is the run directory that the events are of, or a file; ``records`` are files of other tools with
    statistics, and their ranks.

    Raises:
        OSError: it could not be written; an older dataset stays.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir()
        count = events.write(partial / EVENTS)
        for name in _BESIDE if source.is_dir() else ():
            if (source / name).is_dir():
                shutil.copytree(source / name, partial / name, ignore=functools.partial(_refused, source))
            elif (source / name).is_file():
                shutil.copy2(source / name, partial / name)
        for path, rank in records:
            (partial / STATS).mkdir(exist_ok=True)
            with (partial / STATS / f"{path.name.partition('.')[0]}-{rank_name(rank)}.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in foreign_statistics(path, rank))
        told = [{"path": str(note.path), "text": note.text} for note in notes]
        (partial / NOTES).write_text(json.dumps(told, indent=1) + "\n")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        return count
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_notes(path: Path) -> list[Note]:
    """Return the notes that were made when the dataset was written."""
    try:
        check_plain(path / NOTES, path)
        with open_plain(path / NOTES) as file:
            told = json.loads(file.read())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        return [Note(path / NOTES, f"skipped: {error}")]
    entries = told if isinstance(told, list) else []
    return [Note(Path(str(entry["path"])), str(entry["text"])) for entry in entries if _is_note(entry)]


def _refused(run: Path, folder: str, names: Sequence[str]) -> list[str]:
    """Return the names that are not copied: links to folders, and files that are refused in a run."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if (path.is_symlink() if path.is_dir() else refusal(path, run) is not None)]


def _is_note(entry: object) -> bool:
    return isinstance(entry, Mapping) and {"path", "text"} <= entry.keys()
