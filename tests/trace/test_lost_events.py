"""An event that ended before the process was asked to end is on disk, or counted as lost, and that is said."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import pipesight.trace as trace
from pipesight.trace import _span_events
from pipesight.trace._encode import Encoder
from pipesight.trace._encoder_thread import EncoderThread
from pipesight.trace._write_queue import TraceFile
from support import warm
from support.trace_files import lines_of

ai = trace.ai

PREAMBLE = """
import atexit, logging, os, signal, sys, threading, time
from pipesight.trace import _encoder_thread, _write_queue, ai, start, flush
from pipesight.trace._encoder_thread import EncoderThread
def record(count, node=ai.compute.step):
    for _ in range(count):
        with node: pass
def slow(function, seconds):
    def wrapped(*args):
        time.sleep(seconds)
        return function(*args)
    return wrapped
"""


@pytest.fixture
def run(tmp_path):
    """Run a script, with its trace in ``run`` of the test's directory."""

    def run_script(body: str) -> Any:
        (tmp_path / "script.py").write_text(PREAMBLE + body)
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIPESIGHT_")}
        return warm.run("script.py", cwd=tmp_path, env=env)

    return run_script


def counts(path: Path) -> tuple[int, int, int]:
    """Return how many events a file has, how many it says it has, and how many it says were lost."""
    lines = lines_of(path)
    end = lines[-1]["args"] if lines[-1]["name"] == "end" else {"num_events": -1, "lost_events": 0}
    return sum(line["cat"] != "dftracer" for line in lines), end["num_events"], end["lost_events"]


# Threads.


def test_first_spans_of_many_threads_after_a_fork(run, tmp_path):
    """Threads of a forked process that record their first span together start one thread that writes, not several."""
    body = """
sys.setswitchinterval(1e-5)
start('run', interval=0.001)
def work(barrier):
    barrier.wait()
    record(100)
for _ in range(5):
    if os.fork() == 0:
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=work, args=(barrier,)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        os._exit(0)
    os.wait()
"""
    assert run(body).stderr == ""
    files = list(tmp_path.glob("run-*.pfw.gz"))
    assert [counts(path) for path in files] == [(800, 800, 0)] * 5
    for path in files:
        numbers = [line["id"] for line in lines_of(path) if line["cat"] != "dftracer"]
        assert len(set(numbers)) == 800


def test_flushes_together(tmp_path):
    """Threads that flush before anything is written make one file."""
    for number in range(20):
        with trace.start(tmp_path / f"run{number}", interval=60) as session:
            barrier = threading.Barrier(8)

            def work(barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                with ai.compute.step:
                    pass
                trace.flush()

            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert counts(session.path) == (8, 8, 0)
    assert len(list(tmp_path.iterdir())) == 20


# The end of a process.


def test_slow_end(run, tmp_path):
    """The end waits for as long as events get on, be it many times as long as it waits when they do not."""
    body = """
_encoder_thread._LAST_PATIENCE = _write_queue._PATIENCE = 0.5
_encoder_thread._BATCH = 8 * 100
EncoderThread._lines = slow(EncoderThread._lines, 0.04)
os.pwrite = slow(os.pwrite, 0.04)
start('run', interval=60)
record(2000)
"""
    ended = run(body)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert counts(tmp_path / "run.pfw.gz") == (2000, 2000, 0)


def test_stuck_end(run, tmp_path):
    """If events do not get on, the process ends all the same; they are counted, on stderr and in the file."""
    body = """
_encoder_thread._LAST_PATIENCE = 0.5
start('run', interval=60)
record(5)
flush()
EncoderThread._lines = lambda self, batch: threading.Event().wait()
record(7)
"""
    ended = run(body)
    assert ended.returncode == 0
    assert "pipesight: 7 events of the trace were lost: the thread that writes them is stuck\n" in ended.stderr
    assert counts(tmp_path / "run.pfw.gz") == (5, 5, 7)


def test_disk_that_does_not_respond(run, tmp_path):
    """Where the disk does not respond, the number of events that it did not take is on stderr."""
    body = """
_write_queue._PATIENCE = 0.5
start('run', interval=60)
record(5)
flush()
os.pwrite = lambda *_: threading.Event().wait()
record(7)
"""
    ended = run(body)
    assert ended.returncode == 0
    assert "are being lost: the disk does not respond" in ended.stderr
    assert f"lost 7 events of the trace {tmp_path / 'run.pfw.gz'}\n" in ended.stderr


@pytest.mark.parametrize(
    ("second", "status"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP),
    ],
)
def test_two_ends_at_once(run, tmp_path, second, status):
    """A second end that comes while the first writes waits for what is being written."""
    body = f"""
def end_too():
    time.sleep(0.3)
    {second}
os.pwrite = slow(os.pwrite, 0.04)
_encoder_thread._BATCH = 8 * 100
start('run', interval=60)
threading.Thread(target=end_too, daemon=True).start()
record(2000)
"""
    ended = run(body)
    assert (ended.returncode, ended.stderr) == (status, "")
    assert counts(tmp_path / "run.pfw.gz") == (2000, 2000, 0)


def test_events_after_the_end(tmp_path, caplog):
    """A block that comes when a file is closed is counted as lost, and does not begin the file anew."""
    file = TraceFile(tmp_path / "run", encoder=Encoder())
    file.put(b'{"cat":"mine"}\n' * 3, 3)
    file.close()
    file.put(b'{"cat":"late"}\n' * 2, 2)
    file.flush()
    file.close()
    assert counts(file.files.path) == (3, 3, 0)
    assert file.lost == 2
    assert [record.getMessage() for record in caplog.records] == [f"lost 2 events of the trace {file.files.path}"]


def test_lost_events_of_parts(tmp_path, monkeypatch, caplog):
    """Each part counts what was lost since the part before: together they say how many there were."""
    real, state = os.pwrite, {"full": False}

    def pwrite(*args: Any) -> int:
        if state["full"]:
            raise OSError("full")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with trace.start(tmp_path / "run", interval=60, max_bytes=4000) as session:
        for number in range(40):
            state["full"] = number % 10 == 3
            for _ in range(20):
                with ai.compute.step(args={"noise": os.urandom(20).hex()}):
                    pass
            session.flush()
    found = [counts(path) for path in tmp_path.iterdir()]
    assert len(found) > 3
    assert session.lost == sum(lost for _, _, lost in found) == 80
    assert sum(events for events, _, _ in found) == 720


def test_handler_of_logging_that_raises(tmp_path):
    """A handler of the program that raises while a loss is said stops nothing."""

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise KeyError("mine")

    handler = Raising()
    logging.getLogger().addHandler(handler)
    try:
        with trace.start(tmp_path / "run") as session:
            for node in (ai.compute.step, trace.Node("odd", "test", args={"what": object()}), ai.compute.forward):
                with node:
                    pass
    finally:
        logging.getLogger().removeHandler(handler)
    assert counts(session.path) == (2, 2, 1)


def test_thread_name_beside_a_lost_event(tmp_path, caplog):
    """An event that cannot be written takes no line with it that names its thread."""

    def work() -> None:
        for node in (ai.compute.step, trace.Node("odd", "test", args={"what": object()})):
            with node:
                pass

    with trace.start(tmp_path / "run", interval=60) as session:
        thread = threading.Thread(target=work, name="loader")
        thread.start()
        thread.join()
    assert "loader" in {line["args"]["name"] for line in lines_of(session.path) if line["name"] == "thread_name"}


@pytest.mark.slow
def test_events_dropped_from_a_full_buffer_are_counted(tmp_path, monkeypatch, caplog):
    """Events that are dropped because nothing takes them are counted once each, by however many threads, and said."""
    monkeypatch.setattr("pipesight.trace._encoder_thread._BACKLOG", 8 * 10_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._MOST_BACKLOG", 8 * 20_000)
    monkeypatch.setattr("pipesight.trace._encoder_thread._PATIENCE", 0.01)
    monkeypatch.setattr(_span_events, "BACKLOG_MASK", 255)
    goes_on, real = threading.Event(), EncoderThread._lines
    monkeypatch.setattr(EncoderThread, "_lines", lambda self, batch: goes_on.wait() and real(self, batch))

    def work() -> None:
        for number in range(20_000):
            trace.instant("now", number=number)

    with trace.start(tmp_path / "run", interval=0.01) as session:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        goes_on.set()
    written, said, lost = counts(session.path)
    assert lost == session.lost > 10_000
    assert written == said == 80_000 - lost
    assert f"lost {lost:,} events of the trace {session.path}" in caplog.text


def test_exec(run, tmp_path):
    """What was recorded before os.exec is on disk; if there is no such program, recording goes on."""
    body = """
if len(sys.argv) > 1: sys.exit()
start('run', interval=60)
record(2)
try: os.execl('/no/such/program', 'x')
except FileNotFoundError: record(3)
os.execl(sys.executable, sys.executable, 'script.py', 'again')
"""
    ended = run(body)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sum(line["cat"] != "dftracer" for line in lines_of(tmp_path / "run.pfw.gz")) == 5


def test_exec_on_a_full_disk(run, tmp_path):
    """What was lost is said before the process becomes another program, which cannot say it."""
    body = """
def full(*_): raise OSError(28, "No space left on device")
os.pwrite = full
start('run', interval=60)
record(5)
os.execl(sys.executable, sys.executable, '-S', '-c', '')
"""
    ended = run(body)
    assert ended.returncode == 0
    assert f"lost 5 events of the trace {tmp_path / 'run.pfw.gz'}\n" in ended.stderr


def test_fork_in_a_thread(run, tmp_path):
    """A process that a thread forked ends with its last thread, as it would without a trace, and all is written."""
    body = """
start('run', interval=60)
def later():
    time.sleep(0.2)
    record(3)
def fork():
    if os.fork() == 0:
        record(2)
        threading.Thread(target=later, daemon=True).start()
        return
    print(os.waitstatus_to_exitcode(os.wait()[1]))
thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""
    ended = run(body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")
    (path,) = tmp_path.glob("run-*.pfw.gz")
    assert counts(path) == (5, 5, 0)


# Workers of a DataLoader.


@pytest.mark.parametrize("kept", [False, True])
def test_loader_workers_with_threads(run, tmp_path, kept):
    """All spans of a worker's thread pool are there, also if workers are kept, and so end with the program."""
    body = f"""
import torch
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-6)
class Numbers(torch.utils.data.Dataset):
    pool = None
    def __len__(self): return 40
    def __getitem__(self, index):
        self.pool = self.pool or ThreadPoolExecutor(8)
        return sum(self.pool.map(self.work, range(100)))
    def work(self, number):
        with ai.data.item: pass
        return number
start('run', interval=60)
loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers={kept})
assert sum(int(batch.sum()) for batch in loader) == 40 * 4950
"""
    ended = run(body)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [counts(path) for path in tmp_path.glob("run-*.pfw.gz")] == [(2000, 2000, 0)] * 2
