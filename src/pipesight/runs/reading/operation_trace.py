"""Read a trace of operations: one row for each compute, message and collective of each worker, in Parquet.

Such traces come from large jobs, with the columns that are listed here, times in seconds. They have no events that a
page could draw, but all that a replay needs. Any other Parquet file is refused.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipesight.runs.reading._progress_bar import without_progress_bar
from pipesight.runs.reading.event_tables import Operations
from pipesight.runs.reading.operation_kinds import KINDS, codes_of
from pipesight.runs.reading.reader_notes import NotARunError
from pipesight.runs.reading.safe_open import open_plain

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["COLUMNS", "is_parquet", "read_operations"]

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id")
"""What a trace of operations has; more columns do not matter."""

_MAGIC = b"PAR1"
_SHOWN = 12  # names in a message
_LARGEST = 2**31 - 1
_COARSE = 1e-3  # seconds
_DAY = 86_400.0  # no step is as long; in microseconds, one of 0.1 seconds is


def is_parquet(path: Path) -> bool:
    """Return whether a plain file begins as Parquet does."""
    if not path.is_file():
        return False
    with open_plain(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_operations(path: Path) -> Operations:
    """Read a trace of operations.

    Raises:
        NotARunError: It is damaged, has other columns or kinds of operations, or values that cannot be.
    """
    import duckdb

    config = {"autoinstall_known_extensions": False}
    with duckdb.connect(config=config) as database:  # type: ignore[arg-type]  # DuckDB takes booleans
        try:
            without_progress_bar(database)
            return _read(database, path)
        except duckdb.Error as error:
            raise NotARunError(f"cannot be read: {str(path)!r} ({str(error).partition(chr(10))[0]})") from None


def _read(database: DuckDBPyConnection, path: Path) -> Operations:
    name = "'" + glob.escape(str(path)).replace("'", "''") + "'"
    there = [row[0] for row in database.execute(f"DESCRIBE SELECT * FROM read_parquet({name})").fetchall()]
    if missing := [column for column in COLUMNS if column not in there]:
        raise NotARunError(
            f"not a trace of operations: {str(path)!r} has no column {missing[0]!r} (its columns: "
            f"{_listed(there)}; a trace of operations has: {', '.join(COLUMNS)}); give a run directory, or a trace "
            "such as trace.pfw.gz"
        )
    names = ", ".join(f"'{kind.name}'" for kind in KINDS)
    unknown = database.execute(
        f"SELECT DISTINCT optype::VARCHAR FROM read_parquet({name}) WHERE optype::VARCHAR NOT IN ({names}) ORDER BY 1"
    ).fetchall()
    if unknown:
        raise NotARunError(
            f"unknown kinds of operations in {str(path)!r}: {_listed([row[0] for row in unknown])} (known: "
            f"{names.replace(chr(39), '')}); what waits for them is not known, so the trace cannot be replayed"
        )
    database.execute(
        f"""CREATE TEMP VIEW operations AS SELECT step, dp_rank AS replica, stage, rank,
        list_position([{names}], optype::VARCHAR) - 1 AS kind, start_ts::DOUBLE * 1e6 AS "begin",
        duration::DOUBLE * 1e6 AS duration, {_or_none("mc")} AS chunk, {_or_none("gmc")} AS part,
        {_or_none("mb_id")} AS microbatch, {_or_none("seq_id")} AS seq_id
        FROM read_parquet({name})"""
    )
    limits = {"step": 0, "replica": 0, "stage": 0, "rank": 0, "kind": 0, "chunk": -1, "part": -1, "microbatch": -1}
    good = [f"{column}::BIGINT BETWEEN {least} AND {_LARGEST}" for column, least in limits.items()]
    good += ['isfinite("begin")', "isfinite(duration)", "duration >= 0"]
    (bad,) = database.execute(f"SELECT count(*) FROM operations WHERE ({' AND '.join(good)}) IS NOT true").fetchall()[0]
    if bad:
        raise NotARunError(
            f"operations with a value that is missing, negative or not finite in {str(path)!r}: {bad}; every column "
            "needs one, but for mc, gmc and mb_id where an operation has no chunk or micro-batch"
        )
    (longest,) = database.execute(
        """SELECT max(length) / 1e6 FROM
        (SELECT max("begin" + duration) - min("begin") AS length FROM operations GROUP BY step)"""
    ).fetchall()[0]
    if longest is not None and longest > _DAY:
        raise NotARunError(
            f"times must be seconds in columns start_ts and duration of {str(path)!r} (longest step: {longest:,.0f} "
            "seconds, more than a day); divide them by 1e6 if they are microseconds, by 1e9 if they are nanoseconds"
        )
    _check_precision(database, path, name)
    _check_workers(database, path)
    columns = ", ".join(f"{column}::{'TINYINT' if column == 'kind' else 'INTEGER'} AS {column}" for column in limits)
    before = ", ".join(map(str, codes_of("before")))  # of those that begin together, these come first
    found = database.execute(
        f'SELECT {columns}, "begin", duration, seq_id FROM operations ORDER BY step, replica, stage, '
        f'operations."begin", seq_id, operations.kind NOT IN ({before}), operations.kind'
    ).fetchnumpy()
    if not len(found["step"]):
        raise NotARunError(f"no operations in {str(path)!r}")
    twice = np.ones(len(found["step"]) - 1, bool)
    for name in ("begin", "seq_id", "kind", "stage", "replica", "step", "part", "microbatch"):
        twice &= found[name][1:] == found[name][:-1]
    if twice.any():
        raise NotARunError(
            f"operations that are there twice in {str(path)!r}: {int(twice.sum())} (the first in step "
            f"{found['step'][int(twice.argmax())]}); keep one of each, as SELECT DISTINCT does"
        )
    del found["seq_id"]
    return Operations(**found)


def _check_precision(database: DuckDBPyConnection, path: Path, name: str) -> None:
    """Refuse begins in single precision that are so large that those of different operations are the same."""
    kind, largest = database.execute(
        f"SELECT any_value(typeof(start_ts)), max(abs(start_ts)) FROM read_parquet({name})"
    ).fetchall()[0]
    if kind == "FLOAT" and (apart := float(np.spacing(np.float32(largest)))) > _COARSE:
        raise NotARunError(
            f"times are too coarse in column start_ts of {str(path)!r}: in single precision, those up to "
            f"{largest:,.0f} seconds are {apart:.2g} seconds apart; use doubles, or let each step begin at 0"
        )


def _check_workers(database: DuckDBPyConnection, path: Path) -> None:
    """Refuse ranks that share a place, and places that share a rank."""
    workers = database.execute("SELECT DISTINCT rank, replica, stage FROM operations ORDER BY ALL").fetchall()
    places: dict[tuple[int, int], int] = {}
    ranks: dict[int, tuple[int, int]] = {}
    for rank, *place in workers:
        replica, stage = place
        if (other := places.setdefault((replica, stage), rank)) != rank:
            raise NotARunError(
                f"several ranks share a data-parallel rank and a stage in {str(path)!r} (data-parallel rank {replica}, "
                f"stage {stage}: ranks {other} and {rank}); keep the operations of one rank of each tensor-parallel "
                "group"
            )
        if (known := ranks.setdefault(rank, (replica, stage))) != (replica, stage):
            raise NotARunError(
                f"a rank has several data-parallel ranks or stages in {str(path)!r} (rank {rank}: data-parallel rank "
                f"{known[0]}, stage {known[1]}, and {replica}, {stage}); each worker needs a rank of its own"
            )


def _or_none(column: str) -> str:
    """Read -1 where a value is missing or, as in tables of floats, not a number; DuckDB's ``isnan`` misses some."""
    return f"coalesce(TRY_CAST({column} AS BIGINT), -1)"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", .." if len(names) > _SHOWN else "") if names else "none"
