"""What begins a trace: the environment, `start`, and the import of the package."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pipesight.trace as trace
from pipesight.testing import capture_events
from pipesight.trace.environment_settings import Settings

ai = trace.ai


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PIPESIGHT_", "DFTRACER_")):
            monkeypatch.delenv(name)
    yield
    trace.stop()


def text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def names(path: Path) -> list[str]:
    events = [json.loads(line) for line in text(path).splitlines() if line not in "[]"]
    return [event["name"] for event in events if event["cat"] != "dftracer"]


def run(code: str, *, cwd: Path | None = None, **env: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{name: str(value) for name, value in env.items()}}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=60, check=True)


# The environment.


@pytest.mark.parametrize("word", ["1", "true", "Yes", " ON "])
def test_words_for_yes(monkeypatch, word):
    """A switch is on by any usual word."""
    monkeypatch.setenv("DFTRACER_ENABLE", word)
    assert Settings.from_environment().enable is True


@pytest.mark.parametrize("word", ["0", "false", "No", "off", ""])
def test_words_for_no(monkeypatch, word):
    """A switch is off by any usual word."""
    monkeypatch.setenv("PIPESIGHT_ENABLE", word)
    assert Settings.from_environment().enable is False


def test_nothing_said():
    """Without variables, nothing is enabled and the defaults hold."""
    assert Settings.from_environment() == Settings()


def test_ours_before_dftracers(monkeypatch):
    """A variable of ours wins over DFTracer's of the same name; one that only DFTracer has holds."""
    monkeypatch.setenv("DFTRACER_LOG_FILE", "theirs")
    monkeypatch.setenv("PIPESIGHT_LOG_FILE", "ours")
    monkeypatch.setenv("DFTRACER_INC_METADATA", "0")
    settings = Settings.from_environment()
    assert settings.log_file == Path("ours")
    assert settings.inc_metadata is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DFTRACER_ENABLE", "maybe"),
        ("PIPESIGHT_TRACE_COMPRESSION", "gzip"),
        ("PIPESIGHT_TRACE_INTERVAL", "soon"),
        ("DFTRACER_TRACE_INTERVAL", "-1"),
        ("PIPESIGHT_TRACE_MAX_BYTES", "inf"),
        ("PIPESIGHT_TRACE_MAX_BYTES", "nan"),
        ("PIPESIGHT_TRACE_MAX_BYTES", "1e300"),
        ("DFTRACER_TRACE_MAX_PARTS", "0.5"),
        ("DFTRACER_TRACE_INTERVAL", "1e300"),
        ("PIPESIGHT_TRACE_INTERVAL", "nan"),
        ("PIPESIGHT_TRACE_INTERVAL", "inf"),
        ("PIPESIGHT_TRACE_INTERVAL", "1e-300"),
        ("PIPESIGHT_TRACE_INTERVAL", "0"),
    ],
)
def test_wrong_value(monkeypatch, caplog, name, value):
    """A wrong value is named in one warning, with the variable that holds it, and the default is used."""
    monkeypatch.setenv(name, value)
    assert Settings.from_environment() == Settings()
    (record,) = caplog.records
    assert name in record.getMessage()
    assert repr(value) in record.getMessage()


@pytest.mark.parametrize("value", ["1e300", "nan", "-1", "", "9" * 400, "1e-300", "1_0"])
def test_no_number_of_the_environment_ends_a_thread(tmp_path, value):
    """Whatever the numbers of the environment are, there is a trace, and nothing worse than a warning."""
    code = """if True:
        import threading, time
        from pipesight.trace import ai
        with ai.compute.forward: pass
        time.sleep(0.1)
        print("pipesight-trace" in {thread.name for thread in threading.enumerate()})
    """
    names_of = ("INTERVAL", "MAX_BYTES", "MAX_PARTS")
    wrong = {f"{make}_TRACE_{name}": value for name in names_of for make in ("PIPESIGHT", "DFTRACER")}
    clock = {"PIPESIGHT_PARENT": 1, "PIPESIGHT_CLOCK": f"{value}@{os.uname().nodename}", "RANK": value}
    result = run(code, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE=tmp_path / "run", **wrong, **clock)
    assert result.stdout == "True\n"
    assert "Traceback" not in result.stderr
    (path,) = tmp_path.iterdir()
    assert names(path) == ["forward"]


def test_limits_of_the_environment(monkeypatch):
    """Numbers may be written as floating-point numbers are."""
    monkeypatch.setenv("PIPESIGHT_TRACE_MAX_BYTES", "1e6")
    monkeypatch.setenv("DFTRACER_TRACE_MAX_PARTS", "3")
    monkeypatch.setenv("PIPESIGHT_TRACE_INTERVAL", "2")
    settings = Settings.from_environment()
    assert (settings.max_bytes, settings.max_parts, settings.interval) == (1_000_000, 3, 2.0)


def test_environment_traces(tmp_path):
    """PIPESIGHT_ENABLE and PIPESIGHT_LOG_FILE trace a script that never calls start."""
    code = "from pipesight.trace import ai\nwith ai.compute.forward: pass"
    run(code, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE=tmp_path / "run")
    assert names(tmp_path / "run.pfw.gz") == ["forward"]


def test_environment_without_a_file(tmp_path):
    """PIPESIGHT_ENABLE alone traces into the current folder; DFTRACER_ENABLE waits for initialize_log."""
    code = "from pipesight.trace import ai\nwith ai.compute.forward: pass"
    run(code, cwd=tmp_path, DFTRACER_ENABLE=1)
    assert list(tmp_path.iterdir()) == []
    run(code, cwd=tmp_path, PIPESIGHT_ENABLE=1)
    assert names(tmp_path / "trace.pfw.gz") == ["forward"]


def test_environment_with_a_folder(tmp_path):
    """A name that ends in a slash is a folder, there or not, as for start."""
    code = "from pipesight.trace import ai\nwith ai.compute.forward: pass"
    run(code, cwd=tmp_path, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE="run/")
    assert names(tmp_path / "run" / "trace.pfw.gz") == ["forward"]


def test_switches_are_taken_for_true_or_false(tmp_path):
    """Whatever is given for a switch of start counts as true or false; a trace is not left half begun."""
    with trace.start(tmp_path / "run", compress="yes", include_args=[]), ai.compute.forward(epoch=1):
        assert os.environ["PIPESIGHT_INC_METADATA"] == "0"
    assert names(tmp_path / "run.pfw.gz") == ["forward"]


def test_log_level():
    """PIPESIGHT_LOG_LEVEL is the level of the logger of traces from the import on; one that is none is said."""
    code = "import logging, pipesight.trace; print(logging.getLogger('pipesight.trace').level)"
    assert run(code, PIPESIGHT_LOG_LEVEL="info").stdout == "20\n"
    result = run(code, PIPESIGHT_LOG_LEVEL="LOUD")
    assert result.stdout == "0\n"
    assert "PIPESIGHT_LOG_LEVEL must be DEBUG, INFO, WARN or ERROR, but is 'LOUD'; ignored" in result.stderr


def test_dftracers_environment_traces(tmp_path):
    """So do DFTracer's variables."""
    code = "from pipesight.trace import ai\nwith ai.compute.forward: pass"
    run(code, DFTRACER_ENABLE=1, DFTRACER_LOG_FILE=tmp_path / "run", DFTRACER_TRACE_COMPRESSION=0)
    assert '"name":"forward"' in (tmp_path / "run.pfw").read_text()


def test_environment_cannot_break_import():
    """What cannot be is a warning, not an exception."""
    wrong = {"PIPESIGHT_PARENT": 1, "PIPESIGHT_CLOCK": f"noon@{os.uname().nodename}"}
    result = run("import pipesight.trace", PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE="trace", **wrong)
    assert f"PIPESIGHT_CLOCK must be nanoseconds and a host, but is 'noon@{os.uname().nodename}'" in result.stderr


def test_program_before_environment(tmp_path):
    """A program that is traced by its environment may still start a trace of its own, which replaces that."""
    code = f"""if True:
        from pipesight.trace import ai, start
        with start({str(tmp_path / "own")!r}), ai.compute.forward: pass
    """
    run(code, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE=tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["own.pfw.gz"]


@pytest.mark.parametrize("value", ["x", "", "-1"])
def test_odd_rank(tmp_path, monkeypatch, value):
    """A RANK that is no number does no harm."""
    monkeypatch.setenv("RANK", value)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with trace.start(tmp_path / "run"), ai.compute.forward:
        pass
    assert names(tmp_path / "run.pfw.gz") == ["forward"]


# start and stop.


def test_start_twice(tmp_path):
    """A second start raises, names the file of the first and tells how to end it; the first goes on."""
    with trace.start(tmp_path / "one"):
        with pytest.raises(RuntimeError, match=r"one\.pfw\.gz'; call pipesight\.trace\.stop"):
            trace.start(tmp_path / "two")
        with ai.compute.step:
            pass
    assert names(tmp_path / "one.pfw.gz") == ["step"]


def test_start_again(tmp_path):
    """A trace can follow another, at once and often, into another file or the same."""
    for number in range(20):
        with trace.start(tmp_path / "same", interval=0.001), ai.compute.derive(f"number-{number}"):
            pass
        assert names(tmp_path / "same.pfw.gz") == [f"compute.number-{number}"]
    with trace.start(tmp_path / "other"), ai.compute.step:
        pass
    assert names(tmp_path / "other.pfw.gz") == ["step"]


def test_threads_end_with_trace(tmp_path):
    """After stop no thread of ours is left."""
    with trace.start(tmp_path / "run"), ai.compute.step:
        pass
    for thread in threading.enumerate():
        if thread.name.startswith("pipesight-trace"):
            thread.join(5)
            assert not thread.is_alive()


def test_stop_without_start():
    """Stop without start does nothing, also twice."""
    trace.stop()
    trace.stop()
    trace.flush()


def test_stop_twice(tmp_path):
    """A session that was stopped can be stopped again; another one goes on."""
    first = trace.start(tmp_path / "one")
    first.stop()
    with trace.start(tmp_path / "two"):
        first.stop()
        with ai.compute.step:
            pass
    assert names(tmp_path / "two.pfw.gz") == ["step"]


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
    result = run(code, cwd=tmp_path, **given.get(begin, {}))
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


def test_environment_is_restored(tmp_path, monkeypatch):
    """Start tells the processes to come about the trace by variables; stop puts back what was there."""
    monkeypatch.setenv("PIPESIGHT_ENABLE", "0")
    before = dict(os.environ)
    with trace.start(tmp_path / "run"):
        assert os.environ["PIPESIGHT_LOG_FILE"] == str(tmp_path / "run")
        assert os.environ["PIPESIGHT_ENABLE"] == "1"
    assert dict(os.environ) == before


def test_start_in_thread(tmp_path):
    """A trace may begin and end in a thread that is not the main one."""

    def traced() -> None:
        with trace.start(tmp_path / "run"), ai.compute.step:
            pass

    thread = threading.Thread(target=traced)
    thread.start()
    thread.join()
    assert names(tmp_path / "run.pfw.gz") == ["step"]


def test_change_of_directory(tmp_path, monkeypatch):
    """A relative path means the directory of the start, wherever the program goes then."""
    monkeypatch.chdir(tmp_path)
    with trace.start("run/trace.pfw"):
        os.chdir("/")
        with ai.compute.step:
            pass
    assert names(tmp_path / "run" / "trace.pfw.gz") == ["step"]


def test_without_args(tmp_path):
    """With include_args=False events keep their frame and lose their arguments; a later capture has them."""
    with trace.start(tmp_path / "run", include_args=False), ai.compute.step(args={"lr": 1}):
        pass
    assert '"lr"' not in text(tmp_path / "run.pfw.gz")
    with capture_events() as events, ai.compute.step(args={"lr": 1}):
        pass
    assert events[0]["args"]["lr"] == 1


def test_nothing_recorded(tmp_path):
    """A trace without events makes no file."""
    with trace.start(tmp_path / "run"):
        pass
    assert not list(tmp_path.iterdir())


# capture_events.


def test_capture():
    """Capture gives what was recorded in its block, and nothing before or after."""
    with ai.compute.step:
        pass
    with capture_events() as events:
        with ai.compute.forward(epoch=3):
            pass
        trace.counter("memory", used=1.5)
    with ai.compute.step:
        pass
    assert [(event["name"], event["ph"]) for event in events] == [("forward", "X"), ("memory", "C")]
    assert events[0]["args"]["epoch"] == 3


def test_capture_nested(tmp_path):
    """Captures may be nested, also in a trace; each has the events of its own block."""
    with trace.start(tmp_path / "run"):
        with ai.compute.forward:
            pass
        with capture_events() as outer:
            with ai.compute.backward:
                pass
            with capture_events() as inner, ai.compute.step:
                pass
        with ai.data.item:
            pass
    assert [event["name"] for event in inner] == ["step"]
    assert [event["name"] for event in outer] == ["backward", "step"]
    assert names(tmp_path / "run.pfw.gz") == ["forward", "backward", "step", "item"]


def test_trace_in_capture(tmp_path):
    """A trace that begins in a capture has the names of threads that recorded before."""
    with capture_events():
        thread = threading.Thread(target=ai.compute.step(lambda: None), name="early")
        thread.start()
        thread.join()
        with trace.start(tmp_path / "run"), ai.compute.forward:
            pass
    assert names(tmp_path / "run.pfw.gz") == ["forward"]
    assert '"early"' in text(tmp_path / "run.pfw.gz")


def test_capture_in_threads():
    """Threads that capture at the same time each see all events, of every thread, in order of their ends."""
    seen: list[int] = []

    def work() -> None:
        with capture_events() as events:
            for _ in range(200):
                with ai.compute.step:
                    pass
        mine = [event for event in events if event["tid"] == threading.get_native_id()]
        seen.append(len(mine))
        assert all(event["name"] == "step" for event in events)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [200] * 8


def test_capture_with_exception():
    """A capture ends with its block, however that ends."""
    with pytest.raises(KeyError), capture_events() as events, ai.compute.step:
        raise KeyError
    assert [event["name"] for event in events] == ["step"]


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
    assert run(code).stdout.split() == []


@pytest.mark.alone
def test_import_is_quick(tmp_path):
    """Importing the package takes less than 50 ms of the processor's time, once it is compiled."""
    code = "import time; t = time.process_time(); import pipesight.trace; print(time.process_time() - t)"
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": tmp_path}
    first, *others = (float(run(code, **compiled).stdout) for _ in range(8))
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
