"""Traces of operations: read as they are, and any other Parquet file is refused with the reason."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipesight.runs.reading.operation_kinds import KINDS
from pipesight.runs.reading.run import NotARunError, open_run
from support.made_jobs import MadeJob


@pytest.fixture
def trace(tmp_path):
    return MadeJob(2, 2, microbatches=2, steps=2).write(tmp_path / "job.parquet")


def change(path, **columns):
    """Write a trace again with other columns; ``None`` drops one."""
    table = pq.read_table(path)
    for name, value in columns.items():
        table = table.drop_columns([name])
        if value is not None:
            table = table.append_column(name, value(pq.read_table(path)[name]))
    pq.write_table(table, path)
    return path


def test_operations(trace):
    """A trace has its steps, ranks and operations, in microseconds, by step, replica, stage and begin."""
    with open_run(trace) as run:
        operations = run.operations()
        assert run.steps() == [3, 13]
        assert run.ranks() == [0, 1, 2, 3]
        assert run.events == len(operations) == pq.read_table(trace).num_rows
    first = operations.where((operations.step == 3) & (operations.rank == 0))
    assert [KINDS[kind].name for kind in first.kind.tolist()][:2] == ["params-all-gather", "backward-recv"]
    assert first.duration[0] == pytest.approx(10_000)
    keys = list(zip(operations.step, operations.replica, operations.stage, operations.begin, strict=True))
    assert keys == sorted(keys)


def test_any_types(trace):
    """Smaller numbers and single precision, as others write them, mean the same; so do other names and columns."""
    with open_run(trace) as run:
        before = run.operations()
    change(trace, stage=lambda c: c.cast(pa.int8()), mb_id=lambda c: c.cast(pa.int8()))
    change(trace, start_ts=lambda c: c.cast(pa.float32()), optype=lambda c: c.dictionary_encode())
    other = trace.rename(trace.with_name("a name with [brackets]"))
    with open_run(other) as run:
        after = run.operations()
    assert (after.stage == before.stage).all()
    assert after.begin == pytest.approx(before.begin, abs=1)


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_no_chunk_or_microbatch(trace, missing):
    """What an operation does not have may be -1, missing, or not a number, as in tables of floats."""
    with open_run(trace) as run:
        before = run.operations()

    def without(column):
        values = [missing if value < 0 else float(value) for value in column.to_pylist()]
        return pa.array(values, pa.float64())

    change(trace, mc=without, gmc=without, mb_id=without)
    with open_run(trace) as run:
        after = run.operations()
    for name in ("chunk", "part", "microbatch"):
        assert getattr(before, name).min() == -1
        assert (getattr(after, name) == getattr(before, name)).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"gmc": None}, "has no column 'gmc' .*; give a run directory"),
        (
            {"optype": lambda c: pc.replace_substring(c, "optimizer", "sparkle")},
            "unknown kinds of operations .* sparkle",
        ),
        ({"duration": lambda c: pc.negate(c)}, "a value that is missing, negative or not finite .*: 104;"),
        (
            {"duration": lambda c: pc.multiply(c, float("nan"))},
            "a value that is missing, negative or not finite .*: 112;",
        ),
        ({"start_ts": lambda c: pc.divide(c, 0.0)}, "a value that is missing, negative or not finite"),
        ({"start_ts": lambda c: pc.multiply(c, 1e6)}, "times must be seconds .* divide them by 1e6"),
        ({"rank": lambda c: pa.array(range(len(c)))}, "several ranks share a data-parallel rank and a stage"),
        ({"rank": lambda c: pc.multiply(c, 0)}, r"has several .* stages .*\(rank 0: .* 0, stage 0, and 0, 1\)"),
        (
            {"start_ts": lambda c: pc.add(c, 1.7e9).cast(pa.float32())},
            "too coarse .* up to 1,700,000,000 seconds are 1.3e.02 seconds apart; use doubles",
        ),
    ],
)
def test_refused(trace, columns, message):
    """What cannot be replayed is refused: the rule, the values, the fix."""
    with pytest.raises(NotARunError, match=message):
        open_run(change(trace, **columns))


@pytest.mark.parametrize("again", [slice(0, None), slice(7, 8), slice(40, 60)])
def test_refused_twice(trace, again):
    """Rows that are there twice, wherever they are in the file, are counted and refused."""
    table = pq.read_table(trace)
    more = table.slice(again.start, len(range(*again.indices(len(table)))))
    pq.write_table(pa.concat_tables([table, more]).sort_by("duration"), trace)
    with pytest.raises(NotARunError, match=f"there twice in .*: {len(more)} .*; keep one of each"):
        open_run(trace)


def test_unknown_parquet(tmp_path):
    """Another Parquet file, an empty trace and a damaged one are refused too."""
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(NotARunError, match=r"not a trace of operations: .* has no column 'dp_rank' \(its columns: x;"):
        open_run(path)
    path.write_bytes(b"PAR1" + b"?" * 100)
    with pytest.raises(NotARunError, match="cannot be read"):
        open_run(path)


def test_only_one_attempt(trace):
    """There is no other attempt of a trace."""
    with pytest.raises(ValueError, match="there is no attempt 2"):
        open_run(trace, attempt=2)
