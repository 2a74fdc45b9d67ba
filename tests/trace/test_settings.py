"""Environment variables that start and configure a trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pipesight.trace as trace
from pipesight.trace.environment_settings import Settings
from support.trace_files import event_names
from support.traced import run_code

ai = trace.ai


@pytest.mark.parametrize("word", ["1", "true", "Yes", " ON "])
def test_words_that_mean_true(monkeypatch, word):
    """A switch is on by any usual word."""
    monkeypatch.setenv("DFTRACER_ENABLE", word)
    assert Settings.from_environment().enable is True


@pytest.mark.parametrize("word", ["0", "false", "No", "off", ""])
def test_words_that_mean_false(monkeypatch, word):
    """A switch is off by any usual word."""
    monkeypatch.setenv("PIPESIGHT_ENABLE", word)
    assert Settings.from_environment().enable is False


def test_defaults():
    """Without variables, nothing is enabled and the defaults hold."""
    assert Settings.from_environment() == Settings()


def test_our_variables_take_precedence(monkeypatch):
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
def test_extreme_numbers_do_not_end_a_thread(tmp_path, value):
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
    result = run_code(code, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE=tmp_path / "run", **wrong, **clock)
    assert result.stdout == "True\n"
    assert "Traceback" not in result.stderr
    (path,) = tmp_path.iterdir()
    assert event_names(path) == ["forward"]


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
    run_code(code, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE=tmp_path / "run")
    assert event_names(tmp_path / "run.pfw.gz") == ["forward"]


def test_environment_without_a_file(tmp_path):
    """PIPESIGHT_ENABLE alone traces into the current folder; DFTRACER_ENABLE waits for initialize_log."""
    code = "from pipesight.trace import ai\nwith ai.compute.forward: pass"
    run_code(code, cwd=tmp_path, DFTRACER_ENABLE=1)
    assert list(tmp_path.iterdir()) == []
    run_code(code, cwd=tmp_path, PIPESIGHT_ENABLE=1)
    assert event_names(tmp_path / "trace.pfw.gz") == ["forward"]


def test_environment_with_a_folder(tmp_path):
    """A name that ends in a slash is a folder, there or not, as for start."""
    code = "from pipesight.trace import ai\nwith ai.compute.forward: pass"
    run_code(code, cwd=tmp_path, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE="run/")
    assert event_names(tmp_path / "run" / "trace.pfw.gz") == ["forward"]


def test_switches_are_taken_for_true_or_false(tmp_path):
    """Whatever is given for a switch of start counts as true or false; a trace is not left half begun."""
    with trace.start(tmp_path / "run", compress="yes", include_args=[]), ai.compute.forward(epoch=1):
        assert os.environ["PIPESIGHT_INC_METADATA"] == "0"
    assert event_names(tmp_path / "run.pfw.gz") == ["forward"]


def test_log_level():
    """PIPESIGHT_LOG_LEVEL is the level of the logger of traces from the import on; one that is none is said."""
    code = "import logging, pipesight.trace; print(logging.getLogger('pipesight.trace').level)"
    assert run_code(code, PIPESIGHT_LOG_LEVEL="info").stdout == "20\n"
    result = run_code(code, PIPESIGHT_LOG_LEVEL="LOUD")
    assert result.stdout == "0\n"
    assert "PIPESIGHT_LOG_LEVEL must be DEBUG, INFO, WARN or ERROR, but is 'LOUD'; ignored" in result.stderr


def test_dftracers_environment_traces(tmp_path):
    """So do DFTracer's variables."""
    code = "from pipesight.trace import ai\nwith ai.compute.forward: pass"
    run_code(code, DFTRACER_ENABLE=1, DFTRACER_LOG_FILE=tmp_path / "run", DFTRACER_TRACE_COMPRESSION=0)
    assert '"name":"forward"' in (tmp_path / "run.pfw").read_text()


def test_environment_cannot_break_import():
    """What cannot be is a warning, not an exception."""
    wrong = {"PIPESIGHT_PARENT": 1, "PIPESIGHT_CLOCK": f"noon@{os.uname().nodename}"}
    result = run_code("import pipesight.trace", PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE="trace", **wrong)
    assert f"PIPESIGHT_CLOCK must be nanoseconds and a host, but is 'noon@{os.uname().nodename}'" in result.stderr


def test_program_takes_precedence(tmp_path):
    """A program that is traced by its environment may still start a trace of its own, which replaces that."""
    code = f"""if True:
        from pipesight.trace import ai, start
        with start({str(tmp_path / "own")!r}), ai.compute.forward: pass
    """
    run_code(code, PIPESIGHT_ENABLE=1, PIPESIGHT_LOG_FILE=tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["own.pfw.gz"]


@pytest.mark.parametrize("value", ["x", "", "-1"])
def test_odd_rank(tmp_path, monkeypatch, value):
    """A RANK that is no number does no harm."""
    monkeypatch.setenv("RANK", value)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with trace.start(tmp_path / "run"), ai.compute.forward:
        pass
    assert event_names(tmp_path / "run.pfw.gz") == ["forward"]


def test_environment_is_restored(tmp_path, monkeypatch):
    """Start tells the processes to come about the trace by variables; stop puts back what was there."""
    monkeypatch.setenv("PIPESIGHT_ENABLE", "0")
    before = dict(os.environ)
    with trace.start(tmp_path / "run"):
        assert os.environ["PIPESIGHT_LOG_FILE"] == str(tmp_path / "run")
        assert os.environ["PIPESIGHT_ENABLE"] == "1"
    assert dict(os.environ) == before
