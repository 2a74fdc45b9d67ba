"""Events in DuckDB: traces are read once, into one table, which spills to disk when memory is short."""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pipesight.runs.reading import _adoption_sql as adoption
from pipesight.runs.reading import _duckdb_sql as sql
from pipesight.runs.reading._progress_bar import without_progress_bar
from pipesight.runs.reading.clock_shift import NO_SHIFT, ClockShift
from pipesight.runs.reading.reader_notes import NotARunError

if TYPE_CHECKING:
    from pipesight.runs.reading.event_queries import Frame
    from pipesight.runs.reading.event_tables import Column

__all__ = ["DuckEvents", "FileFacts", "Source", "UnreadableError", "schema_of"]

MEMORY = "512MB"
"""Memory that DuckDB may use before it spills to disk."""
THREADS = 8  # at most: more need more memory, and do not read a compressed file faster


class UnreadableError(Exception):
    """DuckDB cannot read a file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file of events: its rank, and what to add to its times."""

    path: Path
    number: int
    rank: int
    own: bool = True
    shift: ClockShift = NO_SHIFT
    packed: bool = True


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What was found in a file."""

    spans: int
    damaged: int
    """Lines that are not events, or spans without a time."""
    ended: bool
    """Whether the final event of a trace is there."""
    lost: int = 0
    """How many events could not be written, as the final event says."""


class DuckEvents:
    """A table of events in a temporary database.

    ``whole`` reads every event with all its fields, for a dataset, instead of only spans.
    """

    def __init__(self, *, whole: bool = False) -> None:
        import duckdb

        self.is_whole = whole
        self._is_dataset = False

        self._folder = tempfile.TemporaryDirectory(prefix="pipesight-", ignore_cleanup_errors=True)
        self._database = duckdb.connect(
            config={
                "memory_limit": MEMORY,
                "threads": min(os.cpu_count() or 1, THREADS),
                "temp_directory": self._folder.name,
                "preserve_insertion_order": False,
                "autoinstall_known_extensions": False,
            }
        )
        without_progress_bar(self._database)
        self._database.execute(sql.SOURCES)
        if whole:
            self._database.execute(sql.WHOLE)
        atexit.register(_forget)

    @property
    def folder(self) -> Path:
        """A folder for temporary files."""
        return Path(self._folder.name)

    def read(self, sources: Sequence[Source], *, foreign: bool = False) -> None:
        """Add the events of some files: of all or, if one is damaged or gone (`UnreadableError`), of none."""
        import duckdb

        run = self._database.execute
        try:
            run("BEGIN")
            run("DELETE FROM sources")
            rows = [(str(s.path), s.number, s.rank, s.own, *astuple(s.shift)) for s in sources]
            self._database.executemany("INSERT INTO sources VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            for packed in (True, False):
                paths = [glob.escape(str(source.path)) for source in sources if source.packed == packed]
                if paths:
                    query = sql.events(packed=packed, foreign=foreign, together=len(paths) > 1, whole=self.is_whole)
                    run(f"INSERT INTO events {query}", {"paths": paths})
            run("COMMIT")
        except duckdb.Error as error:
            with contextlib.suppress(duckdb.Error):
                run("ROLLBACK")
            raise UnreadableError(str(error)) from None

    def remove(self, number: int) -> None:
        """Remove the events of a file."""
        self._database.execute("DELETE FROM events WHERE file = $number", {"number": number})

    def adopt(self, places: Mapping[int, int | None]) -> dict[int, str]:
        """Infer the steps, ranks and partitions of tasks that other tools recorded; return what could not be told.

        ``places`` has the place of each file's rank in its pipeline, by the number of the file, if it is known.
        """
        run, files = self._database.execute, {"files": list(places)}
        run(adoption.PLACES, {**files, "places": [-1 if place is None else place for place in places.values()]})
        for statement in adoption.ADOPTION:
            run(statement, files)
        if self.is_whole:
            run(adoption.MADE)
        notes = {
            file: f"{pairs:,} overlapped forwards have no time of their own: it is in that of their backwards"
            for file, pairs in run(adoption.UNSPLIT, files).fetchall()
        }
        for (file,) in run(adoption.UNPLACED, files).fetchall():
            notes[file] = "'Forward 0' does not say which partition that is, and the ranks are in several groups"
        run(adoption.DROPPING_UNPLACED, files)
        return notes

    def settle(self) -> dict[int, FileFacts]:
        """Return what was found in each file, by its number, and delete rows that are not needed."""
        rows = self._database.execute(sql.FACTS).fetchall()
        self._database.execute(sql.POINTS)
        self._database.execute(sql.SETTLING_ALL if self.is_whole else sql.SETTLING)
        return {number: FileFacts(*facts) for number, *facts in rows}

    def write(self, folder: Path) -> int:
        """Write every event as Parquet, in files per rank; return the number of events. ``OSError`` on a full disk."""
        import duckdb

        rows = "SELECT * FROM dataset" if self._is_dataset else sql.DATASET
        try:
            found = self._database.execute(f"COPY ({rows}) TO {_quoted(folder)} {sql.PARQUET}").fetchall()
        except duckdb.Error as error:
            raise OSError(str(error).partition("\n")[0]) from None
        for file in sorted(folder.glob("process_rank=*/events-*.parquet")):
            rank, part = int(file.parent.name.partition("=")[2]), file.stem.partition("-")[2]
            file.rename(folder / f"rank-{rank:05}-{part}.parquet")
        for empty in folder.glob("process_rank=*"):
            empty.rmdir()
        return int(found[0][0])

    @classmethod
    def of_parquet(cls, folder: Path) -> Self:
        """Query the Parquet files that `write` made, without a copy; `NotARunError` if they are damaged."""
        import duckdb

        made = cls()
        made.is_whole = made._is_dataset = True
        files = _quoted(Path(glob.escape(str(folder)), "*.parquet"))
        try:
            made._database.execute(f"CREATE TEMP VIEW dataset AS SELECT * FROM read_parquet({files})")
            made._database.execute("SELECT count(*) FROM dataset").fetchall()  # opens all of them
        except duckdb.Error as error:
            made.close()
            raise NotARunError(f"cannot be read: {str(folder)!r} ({str(error).partition(chr(10))[0]})") from None
        return made

    @property
    def frame(self) -> Frame:
        """The spans, as a lazy frame."""
        import narwhals

        from pipesight.runs.reading.event_queries import of_dataset

        if self._is_dataset:
            return of_dataset(narwhals.from_native(self._database.view("dataset")))
        spans: Frame = narwhals.from_native(self._database.table("events"))
        return spans.filter(narwhals.col("kind") >= -1) if self.is_whole else spans

    def fetch(self, query: Frame) -> Mapping[str, Column]:
        """Run a query, and return its columns."""
        found: Mapping[str, Column] = query.to_native().fetchnumpy()
        return found

    def points(self) -> Mapping[str, Column]:
        """Return the counters and instants of the ranks' own processes, with their values as JSON, by rank and time."""
        columns = 'rank, category, name, "begin", "values"'
        if self._is_dataset:
            columns = 'process_rank AS rank, category, name, started AS "begin", arguments AS "values"'
        where = "WHERE event IN ('counter', 'instant')" if self._is_dataset else ""
        table = "dataset" if self._is_dataset else "points"
        query = f'SELECT {columns} FROM {table} {where} ORDER BY rank, "begin", name'
        found: Mapping[str, Column] = self._database.execute(query).fetchnumpy()
        return found

    def close(self) -> None:
        """Close the database, and delete the temporary files."""
        self._database.close()
        self._folder.cleanup()


def schema_of(file: Path) -> int:
    """Return the version of the columns of a Parquet file, 1 without one; `NotARunError` if it is damaged."""
    import duckdb

    query = f"SELECT value::VARCHAR FROM parquet_kv_metadata({_quoted(Path(glob.escape(str(file))))}) WHERE key = "
    try:
        with duckdb.connect() as database:
            found = database.execute(f"{query} 'pipesight_events'::BLOB").fetchall()
    except duckdb.Error as error:
        raise NotARunError(f"cannot be read: {str(file)!r} ({str(error).partition(chr(10))[0]})") from None
    return int(found[0][0]) if found and found[0][0].isdecimal() else 1


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _forget() -> None:
    """Clear narwhals' cache of DuckDB types, about which DuckDB would complain at exit."""
    with contextlib.suppress(Exception):
        from narwhals import _namespace

        _namespace._builtin_namespace.cache_clear()
