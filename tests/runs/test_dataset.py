"""Datasets: everything that a trace says is in them, under names and in words that others can use."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import duckdb
import pandas
import pytest

import pipesight.trace as trace
from pipesight.runs.reading.event_codes import KINDS, PHASES
from pipesight.runs.reading.run import NotARunError, open_run
from pipesight.trace._span_events import Mark, put
from support.synthetic import Made

ai = trace.ai

# Of SQL:2016, those that an event might be tempted to use.
RESERVED = {"begin", "end", "start", "partition", "rank", "value", "time", "timestamp", "row", "interval"}


def record(path: Path) -> Path:
    """Write one of everything, with strings that hurt."""
    hostile = "\"'\\\n\r\t\0\x1b\u2028,;%s {} é \U0001f600"
    with trace.start(path) as session:
        for epoch in ai.pipeline.epoch.iter(range(2)):
            args = {"loss": float("nan"), "big": 2**80, "deep": {"a": [1, None, {hostile: hostile}]}, hostile: -1}
            with ai.compute.forward(epoch=epoch, step=7, args=args):
                trace.instant(hostile, lr=0.1, partition=3, size=-1)
            trace.counter("memory", used=2**40, free=-0.5)
        ai.compute.start(metadata=True)
        ai.compute.stop(metadata=True)
        with ai.compute.forward(args={"step": -1, "partition": 0, "microbatch": 0, "layer": "", "size": "large"}):
            pass
        with trace.Node(hostile, "")(args={"level": "mine", "p_idx": 5}), trace.Node("", hostile):
            put(Mark("s", "send", "flow", 17), {})
            put(Mark("f", "send", "flow", 17), {})
        thread = threading.Thread(target=ai.compute.step(lambda: None), name=hostile)
        thread.start()
        thread.join()
    return session.path


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row says, as a line of a trace."""
    phases = {"span": "X", "frame": "X", "metadata": "M", "counter": "C", "instant": "i"}
    phases |= {"arrow start": "s", "arrow end": "f"}
    line = {"id": row["id"], "name": row["name"], "cat": row["category"] or "", "pid": row["pid"], "tid": row["tid"]}
    line |= {"ts": row["started"], "dur": row["duration"], "ph": phases[row["event"]]}
    line |= {"args": json.loads(row["arguments"])} | json.loads(row["other_fields"] or "{}")
    return {name: value for name, value in line.items() if value is not None}


def rows_of(dataset: Path) -> list[dict[str, Any]]:
    """Read a dataset as others do."""
    frame = pandas.read_parquet(dataset / "events", dtype_backend="pyarrow")
    return [
        {name: None if value is pandas.NA else value for name, value in row.items()}
        for row in frame.to_dict(orient="records")
    ]


def in_order(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(line, sort_keys=True) for line in lines)


def test_everything_is_there(tmp_path):
    """Each line of a trace is found again in its dataset, with all it says, and nothing else is."""
    path = record(tmp_path / "run")
    with open_run(path) as run:
        count = run.write_dataset(tmp_path / "dataset")
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().split("\n")[1:-2]]
    rows = rows_of(tmp_path / "dataset")
    assert in_order([line_of(row) for row in rows]) == in_order(lines)
    assert count == len(rows) == len(lines)
    assert {row["event"] for row in rows} == {
        *("span", "frame", "metadata", "counter", "instant", "arrow start", "arrow end")
    }
    for row in rows:
        assert row["ended"] == (None if row["duration"] is None else row["started"] + row["duration"])
        known = json.loads(row["arguments"])
        assert row["parent_id"] == known.get("p_idx")
        assert row["depth"] == known.get("level")


def test_nothing_stands_for_nothing(tmp_path):
    """What an event has not is null, and codes are words."""
    made = Made(tmp_path / "run", chunks=2)
    made.gpipe(0, lambda phase, i, j: 10, layers=lambda j: ["a"])
    made.span("dataloader", "fetch", begin=1, dur=2)
    made.event("mine", "beside", begin=1, dur=2, tid=9)
    with open_run(made.write()) as run:
        run.write_dataset(tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    assert {row["phase"] for row in rows} == {"forward", "backward", None} < {*PHASES, None}
    assert {row["kind"] for row in rows} == {"data loading", None} < {*KINDS, None}
    (beside,) = (row for row in rows if row["name"] == "beside")
    assert {name for name, value in beside.items() if value is None} == {
        *("phase", "kind", "step", "minibatch", "partition_index", "microbatch", "layer", "device", "size_bytes"),
        *("peers", "samples", "module", "other_fields"),
    }
    assert not any(value == -1 or value == "" for row in rows for value in row.values())


def test_names_of_columns(tmp_path):
    """No column needs quotes in SQL; the folder holds nothing but Parquet; each file says its version."""
    with open_run(record(tmp_path / "run")) as run:
        run.write_dataset(tmp_path / "dataset")
    files = sorted((tmp_path / "dataset/events").iterdir())
    assert {file.suffix for file in files} == {".parquet"}
    with duckdb.connect() as database:
        names = database.sql(f"SELECT * FROM '{files[0]}'").columns
        database.sql(f"SELECT {', '.join(names)} FROM '{files[0]}'").fetchall()
        reserved = "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
        assert not (RESERVED | {word for (word,) in database.sql(reserved).fetchall()}) & set(names)
        found = database.sql(f"SELECT key, value FROM parquet_kv_metadata('{files[0]}')").fetchall()
    assert (b"pipesight_events", b"3") in found


def test_dataset_of_a_dataset(tmp_path):
    """A dataset made of a dataset is the same."""
    with open_run(record(tmp_path / "run")) as run:
        run.write_dataset(tmp_path / "one")
    with open_run(tmp_path / "one") as run:
        run.write_dataset(tmp_path / "two")
    one, two = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert sorted(map(str, one)) == sorted(map(str, two))


def test_trace_of_others(tmp_path):
    """Of a trace that PyTorch's profiler wrote, what columns cannot hold is kept as it was."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10.25, "dur": 1.5, "args": {"x": 1}},
        {"ph": "i", "name": "Record Window End", "pid": "Traces", "tid": "Trace", "ts": 11.75, "s": "g"},
        {"ph": "C", "name": "memory", "pid": 3, "tid": 0, "ts": 11, "args": {"Total Allocated": 5}},
        {"ph": "s", "id": 4, "pid": 3, "tid": 0, "ts": 11, "cat": "ac2g", "name": "ac2g"},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    with open_run(tmp_path / "t.json") as run:
        run.write_dataset(tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    whole = [
        {"name": row["name"], **json.loads(row["other_fields"])}
        | ({"cat": row["category"]} if row["category"] else {})
        | ({"args": json.loads(row["arguments"])} if row["arguments"] else {})
        for row in rows
    ]
    assert in_order(whole) == in_order(events)


def test_dataset_of_another_version(tmp_path):
    """A dataset with other columns is refused, with what to do, and can be replaced."""
    old = tmp_path / "dataset/events/rank=0"
    old.mkdir(parents=True)
    duckdb.sql("SELECT 1 AS phase").write_parquet(str(old / "events-0.parquet"))
    message = r"its schema: 1, expected: 3\); convert the run again: pipesight convert RUN"
    with pytest.raises(NotARunError, match=message):
        open_run(tmp_path / "dataset")


def test_half_characters_are_said(tmp_path):
    """Text that Parquet cannot hold is replaced, and that is said."""
    with trace.start(tmp_path / "run") as session, ai.compute.step(args={"path": "a\ud800b"}):
        pass
    with open_run(session.path, whole=True) as run:
        run.write_dataset(tmp_path / "dataset")
        assert [note.text for note in run.notes] == ["lone surrogates, not valid Unicode, are replaced by \ufffd"]
    assert any("a\ufffdb" in row["arguments"] for row in rows_of(tmp_path / "dataset"))
