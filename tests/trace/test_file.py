"""The file of a trace: its lines, when they are there, and what happens when the disk does not play along."""

from __future__ import annotations

import errno
import gzip
import importlib.resources
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesight.trace as trace
from pipesight.testing import capture_events
from pipesight.trace import _span, _trace_file, gpu_spans
from pipesight.trace._encoder_thread import EncoderThread
from pipesight.trace._span import Mark, put
from pipesight.trace._tracer import tracer

ai = trace.ai


@pytest.fixture(autouse=True)
def stopped():
    yield
    trace.stop()


def zcat(path: Path) -> str:
    """Return what plain zcat says, which must not complain."""
    result = subprocess.run(["zcat", str(path)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in zcat(path).splitlines() if line not in ("[", "]")]


def events_of(path: Path) -> list[dict[str, Any]]:
    return [line for line in read(path) if line["cat"] != "dftracer"]


def end_of(path: Path) -> dict[str, Any]:
    return next(line["args"] for line in read(path) if line["name"] == "end")


def record(count: int, node: trace.Node = ai.compute.step) -> None:
    for _ in range(count):
        with node:
            pass


# Lines.


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
    lines = read(session.path)
    for line in lines:
        validator.validate(line)
    assert {line["ph"] for line in lines} == {"X", "M", "C", "i", "s", "f"}
    for spoilt in ({"dur": -1}, {"ph": "B"}, {"ts": 1.5}, {"args": {"level": 2}}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**lines[-2], "ph": "X", "ts": 1, "dur": 1, **spoilt})


def test_frame(tmp_path):
    """A file begins and ends as one of DFTracer does: the hashes and their names, start with id 6, end with counts."""
    session = varied(tmp_path / "run")
    text = zcat(session.path).splitlines()
    assert (text[0], text[-1]) == ("[", "]")
    lines = read(session.path)
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
    text = zcat(varied(tmp_path / "run").path)
    json.loads(text.replace("}\n{", "},\n{"))


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
    metadata = {line["name"]: line["args"] for line in read(session.path) if line["ph"] == "M"}
    assert metadata["process_name"]["name"] == "rank 3"
    assert metadata["process_sort_index"]["sort_index"] == 3
    assert metadata["thread_sort_index"]["sort_index"] == 0
    names = {line["tid"]: line["args"]["name"] for line in read(session.path) if line["name"] == "thread_name"}
    events = events_of(session.path)
    assert {names[event["tid"]] for event in events} == {"MainThread", "loader"}


def test_own_arguments(tmp_path):
    """A user's arguments that are called as ours are renamed, and ours stay."""
    with capture_events() as events, ai.compute.step(args={"level": "mine", "p_idx": -1, "hhash": 0}):
        pass
    args = events[0]["args"]
    assert (args["level"], args["p_idx"]) == (2, 6)
    assert (args["level_"], args["p_idx_"], args["hhash_"]) == ("mine", -1, 0)


def test_number_of_thread_again(tmp_path):
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
    names = {line["tid"]: line["args"]["name"] for line in read(session.path) if line["name"] == "thread_name"}
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


# Reading while writing.


def test_readable_at_any_moment(tmp_path):
    """While it is being written, plain zcat and a reader of lines take the file, and it only grows."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.001):
            record(20)

    with trace.start(tmp_path / "run", interval=0.01) as session:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        sizes = []
        until = time.monotonic() + 1
        try:
            while time.monotonic() < until:
                if session.path.exists() and session.path.stat().st_size:
                    sizes.append(len(read(session.path)))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert len(sizes) > 3
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_streaming(tmp_path):
    """An event is on disk less than a second after its end."""
    with trace.start(tmp_path / "run") as session:
        record(1)
        until = time.monotonic() + 1
        while not session.path.exists() or not session.path.stat().st_size or not events_of(session.path):
            assert time.monotonic() < until
            time.sleep(0.02)


def test_flush(tmp_path):
    """After flush, all events that have ended are on disk, in complete members."""
    with trace.start(tmp_path / "run", interval=60) as session:
        for count in range(1, 6):
            record(1)
            session.flush()
            assert len(events_of(session.path)) == count


def test_uncompressed(tmp_path):
    """With compress=False the file is plain text, and named so."""
    with trace.start(tmp_path / "run.pfw.gz", compress=False) as session:
        record(3)
    assert session.path.name == "run.pfw"
    assert len(session.path.read_text().splitlines()) == 2 + 9 + 3 + 1


# Rotation.


def test_parts(tmp_path):
    """Parts stay under max_bytes, each with frame and thread names; no event is lost or twice there."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with ai.compute.step(args={"noise": os.urandom(40).hex()}):
                stop.wait(0.001)

    with trace.start(tmp_path / "run", max_bytes=20_000, interval=0.02) as session:
        threads = [threading.Thread(target=work, name=f"worker {number}") for number in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.8)
        stop.set()
        for thread in threads:
            thread.join()
        for _ in range(500):
            with ai.compute.forward(args={"noise": os.urandom(40).hex()}):
                pass
        first = _span.next_id()
    parts = sorted(tmp_path.iterdir(), key=lambda path: int(path.name[8:-7] or 1) if "part" in path.name else 1)
    assert [path.name for path in parts] == [
        "run.pfw.gz",
        *(f"run.part{n}.pfw.gz" for n in range(2, len(parts) + 1)),
    ]
    assert len(parts) > 3
    ids: list[int] = []
    for part in parts:
        assert part.stat().st_size <= 20_000
        lines = read(part)
        assert [line["name"] for line in lines[:6]] == ["HH", "thread_name", "FH", "SH", "SH", "start"]
        events = [line for line in lines if line["cat"] != "dftracer"]
        assert lines[-1]["args"]["num_events"] == len(events) > 0
        named = {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}
        assert {event["tid"] for event in events} <= set(named)
        ids += [event["id"] for event in events]
    assert session.lost == 0
    assert len(ids) == len(set(ids))
    assert sorted(ids) == list(range(min(ids), first))


# Disks.


def test_parts_that_go(tmp_path):
    """With max_parts, the oldest parts go; what was in them is counted, and the rest is there, in order."""
    with trace.start(tmp_path / "run", max_bytes=4_000, max_parts=3, interval=0.02) as session:
        for _ in range(60):
            record(100)
            session.flush()
    files = sorted(tmp_path.iterdir(), key=lambda file: int(file.name.split(".")[1].removeprefix("part")))
    assert len(files) == 3
    left = [event["id"] for file in files for event in events_of(file)]
    assert left == sorted(left)
    assert (len(left), session.removed) == (session.written, 6_000 - session.written)
    assert session.lost == 0
    with pytest.raises(ValueError, match="max_parts must be a positive whole number"):
        trace.start(tmp_path / "run", max_parts=0)


def test_pause(tmp_path):
    """Between pause and resume nothing is recorded, but a span that began before is."""
    with trace.start(tmp_path / "run") as session:
        with ai.compute.forward:
            session.pause()
            record(3)
        session.resume()
        record(1)
    assert [event["name"] for event in events_of(session.path)] == ["forward", "step"]


def test_pause_with_another_reader(tmp_path):
    """A pause leaves others what they asked for."""
    with trace.start(tmp_path / "run") as session, capture_events() as events:
        session.pause()
        record(2)
    assert len(events) == 2


def test_full_disk(tmp_path, caplog):
    """On a full disk training goes on: one warning, the lost events counted, and what was there stays readable."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk]).returncode:
        pytest.skip("needs root")
    try:
        with trace.start(disk / "run", interval=60) as session:
            for _ in range(20):
                for _ in range(200):
                    with ai.compute.step(args={"noise": os.urandom(50).hex()}):
                        pass
                session.flush()
                assert session.path.exists() == bool(zcat(session.path))
        events = events_of(session.path)
        assert 0 < len(events) < 4000
        assert session.lost == 4000 - len(events)
        assert end_of(session.path) | {"num_events": len(events), "lost_events": session.lost} == end_of(session.path)
    finally:
        subprocess.run(["umount", disk], check=True)
    warning, total = caplog.records
    assert total.getMessage() == f"lost {session.lost:,} events of the trace {session.path}"
    assert "No space left" in warning.getMessage()


def test_disk_recovers(tmp_path, caplog, monkeypatch):
    """Once there is room again, writing goes on where it stopped."""
    real, state = os.pwrite, {"full": False}

    def pwrite(descriptor: int, block: bytes, at: int) -> int:
        if state["full"]:
            real(descriptor, bytes(block)[: len(block) // 2], at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, block, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with trace.start(tmp_path / "run", interval=60) as session:
        for state["full"] in (False, True, True, False):
            record(5)
            session.flush()
            zcat(session.path)
    assert len(events_of(session.path)) == 10
    assert session.lost == end_of(session.path)["lost_events"] == 10
    assert len(caplog.records) == 2


def test_impossible_directory(tmp_path, caplog):
    """Where no file can be made, training goes on, with one warning and a count."""
    (tmp_path / "file").touch()
    with trace.start(tmp_path / "file" / "run") as session:
        record(3)
        session.flush()
        record(4)
    assert session.lost == 7
    warning, _ = caplog.records
    assert "training continues" in warning.getMessage()


def test_read_only_directory(tmp_path):
    """A directory that may not be written to is no reason to stop."""
    code = """if True:
        import os, sys
        from pipesight.trace import ai, start
        with start(sys.argv[1]) as session:
            if not os.geteuid(): os.seteuid(65534)
            for _ in range(3):
                with ai.compute.step: pass
                session.flush()
        print(session.lost)
    """
    folder = Path(f"/tmp/pipesight-{os.getpid()}")
    folder.mkdir(mode=0o555)
    try:
        command = [sys.executable, "-c", code, str(folder / "run")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        folder.rmdir()
    assert result.stdout == "3\n"
    assert result.stderr.count("Permission denied") == 1


@pytest.mark.parametrize("when", ["before more events", "before stop"])
@pytest.mark.parametrize("what", ["file", "directory"])
def test_deleted(tmp_path, caplog, what, when):
    """If the file vanishes, what was in it is counted as lost, said once, and the trace goes on in a new one."""
    folder = tmp_path / "folder"
    with trace.start(folder / "run", interval=60) as session:
        record(3)
        session.flush()
        session.path.unlink()
        if what == "directory":
            folder.rmdir()
        record(4 if when == "before more events" else 0)
    assert session.lost == 3
    assert len(events_of(session.path)) == (4 if when == "before more events" else 0)
    assert end_of(session.path)["lost_events"] == 3
    warning, _ = caplog.records
    assert "deleted" in warning.getMessage()


def test_closed_descriptor(tmp_path, caplog):
    """If someone closes our descriptor, the file that gets its number is left alone, and nothing is lost."""
    other = tmp_path / "other"
    with trace.start(tmp_path / "run", interval=60) as session:
        record(3)
        session.flush()
        (ours,) = [n for n in os.listdir("/proc/self/fd") if _target(n) == str(session.path)]
        os.close(int(ours))
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT)
        assert descriptor == int(ours)
        record(4)
        session.flush()
        os.fstat(descriptor)
    os.close(descriptor)
    assert other.read_bytes() == b""
    assert len(events_of(session.path)) == 7
    assert session.lost == 0
    assert not caplog.records


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_hanging_disk(tmp_path, caplog, monkeypatch):
    """On a disk that hangs, recording does not wait, memory is bounded, the oldest events are dropped and counted."""
    monkeypatch.setattr(_trace_file, "_MOST_WAITING", 40_000)
    monkeypatch.setattr(_trace_file, "_PATIENCE", 0.2)
    real, answers = os.pwrite, threading.Event()

    def pwrite(*args: Any) -> int:
        answers.wait()
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    session = trace.start(tmp_path / "run", interval=0.01)
    try:
        longest = 0.0
        for _ in range(200):
            begin = time.perf_counter()
            record(100)
            longest = max(longest, time.perf_counter() - begin)
            tracer._thread.drain()
        assert longest < 0.15
        assert session._file._bytes_waiting() < 50_000
        assert session.lost > 10_000
        begin = time.perf_counter()
        session.flush()
        assert time.perf_counter() - begin < 1
    finally:
        answers.set()
    session.stop()
    events = events_of(session.path)
    assert len(events) == 20_000 - session.lost == end_of(session.path)["num_events"]
    last = max(event["id"] for event in events)
    assert [event["id"] for event in events[-100:]] == list(range(last - 99, last + 1))
    assert len(caplog.records) == 2


def test_process_ends_though_disk_hangs(tmp_path):
    """A disk that hangs for ever does not keep the process from its end."""
    code = """if True:
        import os, sys, threading
        from pipesight.trace import _trace_file, ai, start
        _trace_file._PATIENCE = 0.2
        os.pwrite = lambda *_: threading.Event().wait()
        start(sys.argv[1])
        with ai.compute.step: pass
    """
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 0
    assert "does not respond" in result.stderr


def test_stuck_drain(tmp_path, monkeypatch):
    """If even the thread that drains is stuck, the oldest events are dropped and counted."""
    monkeypatch.setattr("pipesight.trace._encoder_thread._BACKLOG", 8 * 20_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._MOST_BACKLOG", 8 * 40_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._PATIENCE", 0.01)
    goes_on, real = threading.Event(), EncoderThread._drain
    monkeypatch.setattr(EncoderThread, "_drain", lambda self, requests: goes_on.wait() and real(self, requests))
    with trace.start(tmp_path / "run", interval=0.01) as session:
        record(100_000)
        assert len(_span.EVENTS) <= 8 * 60_000
        goes_on.set()
    assert session.lost >= 40_000
    assert len(events_of(session.path)) == 100_000 - session.lost


def test_slow_drain(tmp_path, monkeypatch):
    """A thread that drains slowly, as on a machine with much else to do, is waited for: nothing is lost."""
    monkeypatch.setattr("pipesight.trace._encoder_thread._BATCH", 8 * 500)
    monkeypatch.setattr("pipesight.trace._encoder_thread._BACKLOG", 8 * 10_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._MOST_BACKLOG", 8 * 20_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._PATIENCE", 0.2)
    real = EncoderThread._hand_out
    monkeypatch.setattr(EncoderThread, "_hand_out", lambda self, batch: (time.sleep(0.02), real(self, batch)))
    with trace.start(tmp_path / "run", interval=0.01) as session:
        record(50_000)
    assert session.lost == 0
    assert len(events_of(session.path)) == 50_000


# Time.


def test_clock_that_jumps(tmp_path, monkeypatch):
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
    start = next(line for line in read(session.path) if line["name"] == "start")
    assert abs(start["ts"] / 1e6 - wall) < 0.5
    assert start["args"]["clock_offset_ns"] == tracer.encoder.offset


# Much.


@pytest.mark.alone
def test_bounded_memory(tmp_path):
    """Two million spans in a tight loop take no more memory than one million, and all are in the file."""
    code = """if True:
        import sys
        from pipesight.trace import ai, start
        def resident():
            pages = int(open("/proc/self/statm").read().split()[1])
            return pages * 4096
        with start(sys.argv[1]):
            for _ in range(2):
                for _ in range(1_000_000):
                    with ai.compute.step: pass
                print(resident())
    """
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    one, two = map(int, result.stdout.split())
    assert two < one + 40e6
    assert two < 300e6
    count = subprocess.run(f"zcat {tmp_path / 'run.pfw.gz'} | grep -c compute", shell=True, capture_output=True)
    assert int(count.stdout) == 2_000_000


class Unfinished:
    """An event of CUDA in the stream of a GPU that is far behind."""

    def query(self):
        return False

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1.0


def test_gpu_spans_that_are_dropped_count_as_lost(tmp_path, monkeypatch, caplog):
    """Spans of a GPU that is too far behind are dropped to save memory; the count of lost events has them."""
    monkeypatch.setattr(gpu_spans, "_MOST_PENDING", 5)
    spans, event = gpu_spans.device_spans, Unfinished()
    with trace.start(tmp_path / "run") as session:
        anchor = gpu_spans.Anchor(0, event, 0)
        task = gpu_spans.DeviceTask(anchor, None, deque([Mock(), Mock()]))
        task.begin_layer()
        task.end_layer(ai.compute.forward, (0, 0, 0, 0, "0", 1, 0))
        task.events[-1] = event
        for _ in range(8):
            span = gpu_spans.DeviceSpan(ai.compute.forward, anchor, event)
            span.end = event
            spans._pending.append(span)
        spans._pending.appendleft(task)
        spans.resolve()
        assert len(spans._pending) == 5
    assert session.lost == 2 + 3  # the task and its layer, and the oldest spans
    assert "lost 5 events of the trace" in caplog.text
