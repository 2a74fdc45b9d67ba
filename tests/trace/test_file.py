"""The file of a trace: readable at any time, in parts, paused, and in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

import pipesight.trace as trace
from pipesight.testing import capture_events
from pipesight.trace import _span_events
from support.trace_files import events_of, lines_of, zcat
from support.traced import record

ai = trace.ai


# Reading while writing.


def test_readable_while_it_is_written(tmp_path):
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
                    sizes.append(len([json.loads(line) for line in zcat(session.path).splitlines()[1:]]))
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


# Parts.


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
        first = _span_events.next_id()
    parts = sorted(tmp_path.iterdir(), key=lambda path: int(path.name[8:-7] or 1) if "part" in path.name else 1)
    assert [path.name for path in parts] == [
        "run.pfw.gz",
        *(f"run.part{n}.pfw.gz" for n in range(2, len(parts) + 1)),
    ]
    assert len(parts) > 3
    ids: list[int] = []
    for part in parts:
        assert part.stat().st_size <= 20_000
        lines = lines_of(part)
        assert [line["name"] for line in lines[:6]] == ["HH", "thread_name", "FH", "SH", "SH", "start"]
        events = [line for line in lines if line["cat"] != "dftracer"]
        assert lines[-1]["args"]["num_events"] == len(events) > 0
        named = {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}
        assert {event["tid"] for event in events} <= set(named)
        ids += [event["id"] for event in events]
    assert session.lost == 0
    assert len(ids) == len(set(ids))
    assert sorted(ids) == list(range(min(ids), first))


# Removed parts, and pauses.


def test_oldest_parts_are_removed(tmp_path):
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


# Memory.


@pytest.mark.alone
def test_bounded_memory(tmp_path):
    """Twice as many spans in a tight loop take no more memory, and all are in the file."""
    code = """if True:
        import sys
        from pipesight.trace import ai, start
        def resident():
            pages = int(open("/proc/self/statm").read().split()[1])
            return pages * 4096
        with start(sys.argv[1]):
            for _ in range(2):
                for _ in range(400_000):
                    with ai.compute.step: pass
                print(resident())
    """
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    one, two = map(int, result.stdout.split())
    assert two < one + 40e6
    assert two < 300e6
    count = subprocess.run(f"zcat {tmp_path / 'run.pfw.gz'} | grep -c compute", shell=True, capture_output=True)
    assert int(count.stdout) == 800_000
