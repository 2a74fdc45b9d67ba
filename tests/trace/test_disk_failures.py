"""Disks that are full, slow, gone or stuck: what is lost is counted, and training continues."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import pipesight.trace as trace
from pipesight.trace import _span_events, _write_queue, gpu_spans
from pipesight.trace._encoder_thread import EncoderThread
from pipesight.trace._tracer import tracer
from support.trace_files import end_of, events_of, zcat
from support.traced import record

ai = trace.ai


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
def test_deleted_file(tmp_path, caplog, what, when):
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
    monkeypatch.setattr(_write_queue, "_MOST_WAITING", 40_000)
    monkeypatch.setattr(_write_queue, "_PATIENCE", 0.2)
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


def test_process_ends_although_the_disk_hangs(tmp_path):
    """A disk that hangs for ever does not keep the process from its end."""
    code = """if True:
        import os, sys, threading
        from pipesight.trace import _write_queue, ai, start
        _write_queue._PATIENCE = 0.2
        os.pwrite = lambda *_: threading.Event().wait()
        start(sys.argv[1])
        with ai.compute.step: pass
    """
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 0
    assert "does not respond" in result.stderr


def test_stuck_encoder_thread(tmp_path, monkeypatch):
    """If even the thread that drains is stuck, the oldest events are dropped and counted."""
    monkeypatch.setattr("pipesight.trace._encoder_thread._BACKLOG", 8 * 20_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._MOST_BACKLOG", 8 * 40_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._PATIENCE", 0.01)
    goes_on, real = threading.Event(), EncoderThread._drain
    monkeypatch.setattr(EncoderThread, "_drain", lambda self, requests: goes_on.wait() and real(self, requests))
    with trace.start(tmp_path / "run", interval=0.01) as session:
        record(100_000)
        assert len(_span_events.EVENTS) <= 8 * 60_000
        goes_on.set()
    assert session.lost >= 40_000
    assert len(events_of(session.path)) == 100_000 - session.lost


def test_slow_encoder_thread(tmp_path, monkeypatch):
    """A thread that drains slowly, as on a machine with much else to do, is waited for: nothing is lost."""
    monkeypatch.setattr("pipesight.trace._encoder_thread._BATCH", 8 * 500)
    monkeypatch.setattr("pipesight.trace._encoder_thread._BACKLOG", 8 * 10_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._MOST_BACKLOG", 8 * 20_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._PATIENCE", 0.2)
    real = EncoderThread._hand_out
    monkeypatch.setattr(EncoderThread, "_hand_out", lambda self, batch: (time.sleep(0.01), real(self, batch)))
    with trace.start(tmp_path / "run", interval=0.01) as session:
        record(30_000)
    assert session.lost == 0
    assert len(events_of(session.path)) == 30_000


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
