"""`start` and `stop`: their arguments, devices, threads, and the import of the package."""

from __future__ import annotations

import gzip
import logging
import os
import re
import threading
from pathlib import Path

import pytest

import pipesight.trace as trace
from pipesight.testing import capture_events
from support.trace_files import event_names, zcat
from support.traced import run_code

ai = trace.ai


def test_start_twice(tmp_path):
    """A second start raises, names the file of the first and tells how to end it; the first goes on."""
    with trace.start(tmp_path / "one"):
        with pytest.raises(RuntimeError, match=r"one\.pfw\.gz'; call pipesight\.trace\.stop"):
            trace.start(tmp_path / "two")
        with ai.compute.step:
            pass
    assert event_names(tmp_path / "one.pfw.gz") == ["step"]


def test_start_again(tmp_path):
    """A trace can follow another, at once and often, into another file or the same."""
    for number in range(20):
        with trace.start(tmp_path / "same", interval=0.001), ai.compute.derive(f"number-{number}"):
            pass
        assert event_names(tmp_path / "same.pfw.gz") == [f"compute.number-{number}"]
    with trace.start(tmp_path / "other"), ai.compute.step:
        pass
    assert event_names(tmp_path / "other.pfw.gz") == ["step"]


def test_threads_end_with_trace(tmp_path):
    """After stop no thread of ours is left."""
    with trace.start(tmp_path / "run"), ai.compute.step:
        pass
    for thread in threading.enumerate():
        if thread.name.startswith("pipesight-trace"):
            thread.join(5)
            assert not thread.is_alive()


def test_stop_without_start(tmp_path, monkeypatch):
    """Stop and flush without start do nothing: there is no file, no thread, and the next trace is as usual."""
    monkeypatch.chdir(tmp_path)
    trace.stop()
    trace.stop()
    trace.flush()
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipesight-trace")]
    with trace.start("run"), ai.compute.step:
        pass
    assert event_names(tmp_path / "run.pfw.gz") == ["step"]


def test_stop_twice(tmp_path):
    """A session that was stopped can be stopped again; another one goes on."""
    first = trace.start(tmp_path / "one")
    first.stop()
    with trace.start(tmp_path / "two"):
        first.stop()
        with ai.compute.step:
            pass
    assert event_names(tmp_path / "two.pfw.gz") == ["step"]


WHOLE = "a positive whole number, or None for no limit"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(("interval", value, "0.001 to 86400 seconds") for value in (0, -1.0, 1e300, float("nan"), float("inf"), "1")),
        *(("max_bytes", value, WHOLE) for value in (0, -5, 1e300, "1G")),
        *(("max_parts", value, WHOLE) for value in (float("nan"), 1.5)),
    ],
)
def test_wrong_options(tmp_path, name, value, rule):
    """Options that make no sense are refused with their value."""
    with pytest.raises(ValueError, match=re.escape(f"{name} must be {rule} ({name}: {value!r})")):
        trace.start(tmp_path / "run", **{name: value})


# Devices.


@pytest.mark.parametrize("begin", ["environment", "start", "dftracer"])
def test_device(tmp_path, begin):
    """A device is written to as it is, by this process and those that it starts, and nothing is left beside it."""
    code = {
        "environment": "",
        "start": "from pipesight.trace import start; start('/dev/null', max_bytes=1000)",
        "dftracer": "from dftracer.logger import dftracer; dftracer.initialize_log('/dev/null', None, 7)",
    }[begin]
    code = f"""if True:
        {code}
        import os
        from pipesight.trace import ai, trace_session
        for _ in range(1000):
            with ai.compute.step: pass
        if os.fork() == 0:
            with ai.compute.step: pass
            os._exit(0)
        os.wait()
        trace_session.flush()
        print(trace_session.running().path, trace_session.running().lost)
    """
    before = sorted(os.listdir("/dev"))
    given = {
        "environment": {"PIPESIGHT_ENABLE": 1, "PIPESIGHT_LOG_FILE": "/dev/null"},
        "dftracer": {"DFTRACER_ENABLE": 1},
    }
    result = run_code(code, cwd=tmp_path, **given.get(begin, {}))
    assert (result.stdout, result.stderr) == ("/dev/null 0\n", "")
    assert sorted(os.listdir("/dev")) == before
    assert not list(tmp_path.iterdir())


def test_device_that_takes_nothing(caplog):
    """What a device does not take is counted."""
    with trace.start("/dev/full") as session:
        for _ in range(5):
            with ai.compute.step:
                pass
    assert (session.path, session.lost) == (Path("/dev/full"), 5)
    assert [record.getMessage() for record in caplog.records][-1] == "lost 5 events of the trace /dev/full"


def test_device_that_keeps_what_it_gets(tmp_path):
    """Written to a pipe, a trace is the same as in a file."""
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    with trace.start(fifo):
        for _ in range(5):
            with ai.compute.step:
                pass
            trace.flush()
    reader.join()
    lines = gzip.decompress(got[0]).decode().splitlines()
    assert (lines[0], lines[-1]) == ("[", "]")
    assert sum('"step"' in line for line in lines) == 5


def test_start_in_thread(tmp_path):
    """A trace may begin and end in a thread that is not the main one."""

    def traced() -> None:
        with trace.start(tmp_path / "run"), ai.compute.step:
            pass

    thread = threading.Thread(target=traced)
    thread.start()
    thread.join()
    assert event_names(tmp_path / "run.pfw.gz") == ["step"]


def test_change_of_directory(tmp_path, monkeypatch):
    """A relative path means the directory of the start, wherever the program goes then."""
    monkeypatch.chdir(tmp_path)
    with trace.start("run/trace.pfw"):
        os.chdir("/")
        with ai.compute.step:
            pass
    assert event_names(tmp_path / "run" / "trace.pfw.gz") == ["step"]


def test_without_args(tmp_path):
    """With include_args=False events keep their frame and lose their arguments; a later capture has them."""
    with trace.start(tmp_path / "run", include_args=False), ai.compute.step(args={"lr": 1}):
        pass
    assert '"lr"' not in zcat(tmp_path / "run.pfw.gz")
    with capture_events() as events, ai.compute.step(args={"lr": 1}):
        pass
    assert events[0]["args"]["lr"] == 1


def test_nothing_recorded(tmp_path):
    """A trace without events makes no file."""
    with trace.start(tmp_path / "run"):
        pass
    assert not list(tmp_path.iterdir())


# The import.


def test_import_without_torch():
    """Importing the package, and tracing with it, does not import torch, numpy or asyncio."""
    code = """if True:
        import sys
        from pipesight.testing import capture_events
        from pipesight.trace import ai
        with capture_events(), ai.compute.forward(args={"a": [1]}): pass
        print(*{"torch", "numpy", "asyncio"} & set(sys.modules))
    """
    assert run_code(code).stdout.split() == []


@pytest.mark.alone
def test_import_is_quick(tmp_path):
    """Importing the package takes less than 50 ms of the processor's time, once it is compiled."""
    code = "import time; t = time.process_time(); import pipesight.trace; print(time.process_time() - t)"
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": tmp_path}
    first, *others = (float(run_code(code, **compiled).stdout) for _ in range(8))
    assert min(others) < min(first, 0.05)


def test_log_is_quiet(tmp_path, caplog):
    """A trace that goes well says nothing."""
    with caplog.at_level(logging.DEBUG), trace.start(tmp_path / "run"), ai.compute.step:
        pass
    assert not caplog.records


def test_a_folder_stands_for_a_file_in_it(tmp_path):
    """Given a folder, the trace is in it, not beside it."""
    for given in (tmp_path, f"{tmp_path}/new/"):
        with trace.start(given) as session, ai.compute.step:
            pass
        assert session.path == Path(given) / "trace.pfw.gz"
        assert session.path.exists()


def test_empty_path(tmp_path, monkeypatch):
    """No file is no trace, and nothing is left of the attempt."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path of a trace must not be empty"):
        trace.start("")
    trace.stop()
    trace.start("another").stop()


@pytest.mark.parametrize("path", [3, None, b"trace"])
def test_something_other_than_a_path(path):
    """What is no path is refused, with a path to pass instead."""
    rule = f"the path of a trace must be a string or a pathlib.Path (path: {path!r}); pass a file: "
    with pytest.raises(TypeError, match=re.escape(rule)):
        trace.start(path)
