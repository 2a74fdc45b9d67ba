"""The lines of a trace file, and the values in them."""

from __future__ import annotations

import gzip
import importlib.resources
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesight.trace as trace
from pipesight.testing import capture_events
from pipesight.trace._span_events import Mark, put
from pipesight.trace._tracer import tracer
from support.trace_files import end_of, events_of, lines_of, zcat
from support.traced import record

ai = trace.ai


def varied(path: Path) -> trace.Session:
    """Write one of everything."""
    with trace.start(path) as session:
        for epoch in ai.pipeline.epoch.iter(range(2)):
            with ai.compute.forward(epoch=epoch, step=7, args={"loss": float("nan"), "quote": '"\n\u2028\ud800'}):
                ai.compute.backward(lambda: None)()
        ai.compute.start(metadata=True)
        ai.compute.stop(metadata=True)
        ai.device.transfer.start()
        ai.device.transfer.stop()
        with ai.checkpoint.init:
            trace.instant("lr dropped", lr=0.1)
        trace.counter("memory", used=2**40, free=0.5)
        put(Mark("s", "send", "flow", 17), {})
        put(Mark("f", "send", "flow", 17), {})
        thread = threading.Thread(target=record, args=(1,), name="loader")
        thread.start()
        thread.join()
    return session


def test_schema(tmp_path):
    """Every line of a trace with one of everything is as the schema in the package says, and so is the schema."""
    session = varied(tmp_path / "run")
    schema = json.loads(importlib.resources.files("pipesight.trace").joinpath("schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    lines = lines_of(session.path)
    for line in lines:
        validator.validate(line)
    assert {line["ph"] for line in lines} == {"X", "M", "C", "i", "s", "f"}
    for spoilt in ({"dur": -1}, {"ph": "B"}, {"ts": 1.5}, {"args": {"level": 2}}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**lines[-2], "ph": "X", "ts": 1, "dur": 1, **spoilt})


def test_header_and_footer(tmp_path):
    """A file begins and ends as one of DFTracer does: the hashes and their names, start with id 6, end with counts."""
    session = varied(tmp_path / "run")
    text = zcat(session.path).splitlines()
    assert (text[0], text[-1]) == ("[", "]")
    lines = lines_of(session.path)
    head = [(line["id"], line["name"], line["ph"], line["cat"]) for line in lines[:6]]
    kinds = ["HH", "thread_name", "FH", "SH", "SH"]
    assert head == [(number, kind, "M", "dftracer") for number, kind in enumerate(kinds, 1)] + [
        (6, "start", "X", "dftracer")
    ]
    meanings = {line["args"]["value"]: line["args"]["name"] for line in lines[:5]}
    start = lines[5]["args"]
    assert meanings[start["hhash"]] == os.uname().nodename
    assert meanings[start["cwd"]] == os.getcwd()
    assert meanings[start["cmd_hash"]] == " ".join(sys.argv)
    assert meanings[start["exec_hash"]] == sys.executable
    assert lines[-1]["name"] == "end"
    events = [line for line in lines if line["cat"] != "dftracer" or line["name"] == "CM"]
    assert lines[-1]["args"]["num_events"] == len(events)
    assert lines[-1]["args"]["lost_events"] == 0


def test_json_array(tmp_path):
    """The file as a whole is the array that Chrome and Perfetto read, commas aside."""
    path = varied(tmp_path / "run").path
    assert json.loads(zcat(path).replace("}\n{", "},\n{")) == lines_of(path)


def test_spans(tmp_path):
    """A span has an id, the id of the one around it, its level, its arguments, and a time within that one."""
    with trace.start(tmp_path / "run") as session:
        for _ in ai.pipeline.epoch.iter(range(1)):
            with ai.compute.forward(epoch=1, step=2), ai.compute.backward:
                time.sleep(0.002)
    by_name = {event["name"]: event for event in events_of(session.path)}
    block, outer, inner = by_name["epoch.block"], by_name["forward"], by_name["backward"]
    assert list(outer) == ["id", "name", "cat", "pid", "tid", "ts", "dur", "ph", "args"]
    assert list(outer["args"]) == ["hhash", "p_idx", "epoch", "step", "level"]
    assert block["args"]["count"] == "1"
    assert (block["args"]["p_idx"], block["args"]["level"]) == (6, 2)
    assert (outer["args"]["p_idx"], outer["args"]["level"]) == (block["id"], 3)
    assert (inner["args"]["p_idx"], inner["args"]["level"]) == (outer["id"], 4)
    assert inner["dur"] >= 2000
    assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert (outer["pid"], outer["tid"]) == (os.getpid(), threading.get_native_id())
    assert len({event["id"] for event in by_name.values()}) == len(by_name)


def test_names_and_order(tmp_path, monkeypatch):
    """Processes have a name and a place among others; threads have a name."""
    monkeypatch.setenv("RANK", "3")
    session = varied(tmp_path / "run")
    metadata = {line["name"]: line["args"] for line in lines_of(session.path) if line["ph"] == "M"}
    assert metadata["process_name"]["name"] == "rank 3"
    assert metadata["process_sort_index"]["sort_index"] == 3
    assert metadata["thread_sort_index"]["sort_index"] == 0
    names = {line["tid"]: line["args"]["name"] for line in lines_of(session.path) if line["name"] == "thread_name"}
    events = events_of(session.path)
    assert {names[event["tid"]] for event in events} == {"MainThread", "loader"}


def test_arguments_with_reserved_names(tmp_path):
    """A user's arguments that are called as ours are renamed, and ours stay."""
    with capture_events() as events, ai.compute.step(args={"level": "mine", "p_idx": -1, "hhash": 0}):
        pass
    args = events[0]["args"]
    assert (args["level"], args["p_idx"]) == (2, 6)
    assert (args["level_"], args["p_idx_"], args["hhash_"]) == ("mine", -1, 0)


def test_reused_thread_number(tmp_path):
    """Threads one after the other get the same number from Python; events carry the operating system's."""
    seen = []

    def work() -> None:
        record(2)
        seen.append((threading.get_ident(), threading.get_native_id(), threading.current_thread().name))

    with trace.start(tmp_path / "run", interval=60) as session:
        for number in range(6):
            thread = threading.Thread(target=work, name=f"worker {number}")
            thread.start()
            thread.join()
            if number == 2:
                session.flush()
    assert len({ident for ident, _, _ in seen}) < 6, "no number came again: the test shows nothing"
    assert [event["tid"] for event in events_of(session.path)] == [native for _, native, _ in seen for _ in "ab"]
    names = {line["tid"]: line["args"]["name"] for line in lines_of(session.path) if line["name"] == "thread_name"}
    assert all(names[native] == name for _, native, name in seen)


def test_event_that_cannot_be_written(tmp_path, caplog):
    """An event that JSON cannot hold is left out, counted, and said once; the others are there."""
    odd = trace.Node("odd", "test", args={"what": object()})
    with trace.start(tmp_path / "run") as session:
        record(10)
        record(2, odd)
        record(10)
    assert len(events_of(session.path)) == 20
    assert session.lost == end_of(session.path)["lost_events"] == 2
    warning, total = caplog.records
    assert "odd" in warning.getMessage()
    assert total.getMessage() == f"lost 2 events of the trace {session.path}"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
arguments = st.dictionaries(st.text(max_size=8).filter(lambda name: name not in _span_names), values, max_size=3)
_span_names = {"hhash", "p_idx", "level", "hhash_", "p_idx_", "level_", "epoch", "step"}
trees = st.recursive(
    st.tuples(st.text(max_size=10), arguments, st.just([])),
    lambda inner: st.tuples(st.text(max_size=10), arguments, st.lists(inner, max_size=3)),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(tree=trees)
def test_read_back(tmp_path_factory, tree):
    """Any tree of spans, with any names and arguments, is read back as it was."""
    path = tmp_path_factory.getbasetemp() / "tree"

    def write(branch: Any) -> None:
        name, args, inner = branch
        with trace.Node(name, f"cat {name}")(args=args):
            for other in inner:
                write(other)

    with trace.start(path) as session:
        write(tree)
    with gzip.open(session.path, "rt", newline="\n") as file:
        lines = [json.loads(line) for line in file if len(line) > 2]
    inside: dict[int, list[Any]] = {}

    def rebuild(number: int) -> list[Any]:
        return [
            (event["name"], event["args"], rebuild(event["id"]))
            for event in sorted(inside.get(number, []), key=lambda event: event["id"])
        ]

    for event in (line for line in lines if line["cat"].startswith("cat ")):
        args = event["args"]
        inside.setdefault(args.pop("p_idx"), []).append(event)
        del args["hhash"], args["level"]
    assert rebuild(6) == [tree]


# Time.


def test_wall_clock_that_is_set(tmp_path, monkeypatch):
    """Durations and order do not care that somebody sets the clock; the start says what the clock was."""
    with trace.start(tmp_path / "run") as session:
        wall = time.time()
        with ai.compute.forward:
            monkeypatch.setattr(time, "time", lambda: 0.0)
            monkeypatch.setattr(time, "time_ns", lambda: 0)
            time.sleep(0.01)
        record(1)
    first, second = events_of(session.path)
    assert 10_000 <= first["dur"] < 2_000_000
    assert abs(first["ts"] / 1e6 - wall) < 0.5
    assert first["ts"] + first["dur"] <= second["ts"]
    start = next(line for line in lines_of(session.path) if line["name"] == "start")
    assert abs(start["ts"] / 1e6 - wall) < 0.5
    assert start["args"]["clock_offset_ns"] == tracer.encoder.offset
