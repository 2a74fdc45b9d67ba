"""The general log, and the variables that say how it is written."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.stats.log_settings import LogSettings, log_file, process_rank
from pipesight.stats.message_log import MessageLog
from support import warm
from support.processes import STRICT_PYTHON

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - ([A-Z]+) - (.*)")
LEVEL = "NVDLFW_INSPECT_LOG_LEVEL"
OVERWRITE = "NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE"
TIMESTAMP = "NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP"


def found(log):
    """Return the levels and messages in the file of a log."""
    return [LINE.fullmatch(line).groups() for line in log.path.read_text().splitlines()]


# The variables.


@pytest.mark.parametrize("word", ["1", "true", "True", "YES", " on "])
def test_switched_on(word):
    """1, true, yes and on switch on, whatever their case."""
    settings = LogSettings.from_environment({OVERWRITE: word, TIMESTAMP: word})
    assert settings.overwrite
    assert re.fullmatch(r"\d{8}_\d{6}", settings.timestamp)
    assert settings.mistakes == ()


@pytest.mark.parametrize("word", ["0", "false", "False", "NO", "off"])
def test_switched_off(word):
    """0, false, no and off switch off, whatever their case."""
    settings = LogSettings.from_environment({OVERWRITE: word, TIMESTAMP: word})
    assert (settings.overwrite, settings.timestamp, settings.mistakes) == (False, "", ())


@pytest.mark.parametrize("environment", [{}, {LEVEL: "", OVERWRITE: "", TIMESTAMP: ""}])
def test_defaults(environment):
    """A variable that is unset or empty has its default: INFO, overwrite, no timestamp."""
    assert LogSettings.from_environment(environment) == LogSettings(logging.INFO, True, "", ())


@pytest.mark.parametrize(
    ("word", "level"), [("DEBUG", 10), ("info", 20), ("Warn", 30), ("ERROR ", 40), ("critical", 50), ("15", 15)]
)
def test_level_names(word, level):
    """A level is a name that logging knows, in any case, or a number."""
    assert LogSettings.from_environment({LEVEL: word}) == LogSettings(level=level)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_any_value_is_read(word):
    """Whatever a variable says, there are settings; what is not understood is named, and has the default."""
    settings = LogSettings.from_environment({LEVEL: word, OVERWRITE: word, TIMESTAMP: word})
    assert all(repr(word) in mistake for mistake in settings.mistakes)
    named = [variable for variable in (LEVEL, OVERWRITE, TIMESTAMP) if variable in " ".join(settings.mistakes)]
    switch, level = word.strip().lower(), word.strip().upper()
    right = switch in ("", "0", "1", "true", "false", "yes", "no", "on", "off")
    assert (OVERWRITE in named, TIMESTAMP in named) == (not right, not right)
    if LEVEL in named:
        assert settings.level == logging.INFO
        assert level not in logging.getLevelNamesMapping()


def test_wrong_values_are_named(tmp_path, capsys):
    """A wrong value is named in a warning, with the variable and what is used instead."""
    environment = {LEVEL: "LOUD", OVERWRITE: "maybe", TIMESTAMP: "2"}
    log = MessageLog(tmp_path, rank=0, settings=LogSettings.from_environment(environment))
    log.close()
    assert found(log) == [
        ("WARNING", f"{TIMESTAMP} must be 0 or 1, but is '2'; using 0"),
        (
            "WARNING",
            f"{LEVEL} must be DEBUG, INFO, WARNING, ERROR, CRITICAL or a number, but is 'LOUD'; using INFO",
        ),
        ("WARNING", f"{OVERWRITE} must be 0 or 1, but is 'maybe'; using 1"),
    ]
    assert capsys.readouterr().err.count("pipesight - ") == 3


def test_file_names(tmp_path):
    """The name of a file has the rank in it, and the time where that is asked for."""
    name = log_file(tmp_path, "f", rank=3, settings=LogSettings())
    assert name == tmp_path / "f" / "nvdlfw_inspect_globalrank-3.log"
    name = log_file(tmp_path, "f", rank=0, settings=LogSettings(timestamp="20260131_120000"))
    assert name.name == "nvdlfw_inspect_20260131_120000_globalrank-0.log"


@pytest.mark.parametrize(("given", "rank"), [(None, 0), ("5", 5), ("", 0), ("x", 0), ("-1", 0), ("²", 0)])
def test_rank_of_the_launcher(given, rank, monkeypatch):
    """Without torch.distributed, the rank is what the launcher says, or 0."""
    monkeypatch.delenv("RANK", raising=False)
    if given is not None:
        monkeypatch.setenv("RANK", given)
    assert process_rank() == rank


def test_rank_of_torch(tmp_path):
    """What torch.distributed says is the rank, not the variable; the file is named after it."""
    source = f"""
        import torch.distributed as dist
        from pipesight.stats.message_log import MessageLog
        dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://{tmp_path}/store")
        MessageLog({str(tmp_path)!r}).close()
        dist.destroy_process_group()
    """
    warm.run("-c", textwrap.dedent(source), env={**os.environ, "RANK": "7"}).check_returncode()
    assert os.listdir(tmp_path / "nvdlfw_inspect_logs") == ["nvdlfw_inspect_globalrank-0.log"]


# The log.


def test_messages(tmp_path, capsys):
    """Each message is a line in the file; those from WARNING up are on stderr too, after the name of the tool."""
    log = MessageLog(tmp_path, rank=2)
    assert log.path == tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-2.log"
    log.debug("d")
    log.info("i")
    log.warning("w")
    log.log_message("e", level=logging.ERROR)
    log.log_message("c", "critical")
    log.close()
    lines = log.path.read_text().splitlines()
    assert found(log) == [("INFO", "i"), ("WARNING", "w"), ("ERROR", "e"), ("CRITICAL", "c")]
    assert capsys.readouterr().err.splitlines() == [f"pipesight - {line}" for line in lines[1:]]


def test_repeated_message(tmp_path):
    """A message in a loop is logged each time; nvdlfw_inspect logs it once."""
    log = MessageLog(tmp_path, rank=0)
    for _ in range(3):
        log.log_message("again")
    log.close()
    assert found(log) == [("INFO", "again")] * 3


@pytest.mark.parametrize(("level", "count"), [("DEBUG", 5), ("INFO", 4), ("WARNING", 3), ("50", 1), ("CRITICAL", 1)])
def test_level(level, count, tmp_path, monkeypatch, capsys):
    """Messages below the level of NVDLFW_INSPECT_LOG_LEVEL go neither to the file nor to stderr."""
    monkeypatch.setenv(LEVEL, level)
    log = MessageLog(tmp_path, rank=0)
    for number in (10, 20, 30, 40, 50):
        log.log_message("x", number)
    log.close()
    assert len(found(log)) == count
    assert len(capsys.readouterr().err.splitlines()) == min(count, 3)


def test_unknown_level(tmp_path):
    """A level that logging does not know is an error of the caller's, and says so."""
    log = MessageLog(tmp_path, rank=0)
    with pytest.raises(ValueError, match="unknown log level"):
        log.log_message("x", "LOUD")
    log.close()


@pytest.mark.parametrize("overwrite", ["0", "1"])
def test_overwrite(overwrite, tmp_path, monkeypatch):
    """A second log begins the file anew, or goes on at its end with NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE=0."""
    monkeypatch.setenv(OVERWRITE, overwrite)
    for message in ("one", "two"):
        log = MessageLog(tmp_path, rank=0)
        log.info(message)
        log.close()
    assert [message for _, message in found(log)] == (["two"] if overwrite == "1" else ["one", "two"])


def test_timestamp(tmp_path, monkeypatch):
    """NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP=1 puts the time into the name of the file."""
    monkeypatch.setenv(TIMESTAMP, "1")
    MessageLog(tmp_path, rank=0).close()
    (name,) = os.listdir(tmp_path / "nvdlfw_inspect_logs")
    assert re.fullmatch(r"nvdlfw_inspect_\d{8}_\d{6}_globalrank-0\.log", name)


def test_loggers_of_the_program(tmp_path):
    """A log adds no handler and no logger to the program's, and a configuration of those does not close ours."""
    source = f"""
        import logging, logging.config
        from pipesight.stats.message_log import MessageLog

        def loggers():
            known = {{"": logging.getLogger(), **logging.Logger.manager.loggerDict}}
            return {{name: list(getattr(logger, "handlers", ())) for name, logger in known.items()}}

        before = loggers()
        log = MessageLog({str(tmp_path)!r}, rank=0)
        log.warning("one")
        assert loggers() == before
        logging.config.dictConfig({{"version": 1, "disable_existing_loggers": True}})
        logging.shutdown()
        log.warning("two")
        log.close()
        assert loggers() == before
    """
    subprocess.run([*STRICT_PYTHON, "-c", textwrap.dedent(source)], check=True, timeout=100)
    (path,) = tmp_path.glob("*/*")
    assert [LINE.fullmatch(line)[2] for line in path.read_text().splitlines()] == ["one", "two"]


def test_closed(tmp_path, capsys):
    """After close, nothing is written anywhere; a new log of the same name is not touched by the old one."""
    old = MessageLog(tmp_path, rank=0)
    old.close()
    old.close()
    new = MessageLog(tmp_path, rank=0)
    old.error("old")
    new.info("new")
    new.close()
    assert found(new) == [("INFO", "new")]
    assert capsys.readouterr().err == ""


@given(st.text())
def test_any_text(tmp_path_factory, text):
    """Any string can be logged, and any object."""
    log = MessageLog(tmp_path_factory.mktemp("log"), rank=0)
    log.info(text)
    log.info([text])
    log.close()
    written = log.path.read_bytes().decode()
    assert f" - INFO - {text.encode(errors='backslashreplace').decode()}\n" in written


def test_threads(tmp_path):
    """Messages of many threads are whole lines."""
    log = MessageLog(tmp_path, rank=0)
    work = [threading.Thread(target=lambda n=n: [log.info(f"{n} {'x' * 99}") for _ in range(50)]) for n in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    log.close()
    assert sorted(found(log)) == sorted([("INFO", f"{n} {'x' * 99}") for n in range(8)] * 50)


# What goes wrong.


def test_log_that_cannot_be_made(tmp_path, capsys):
    """Where the folder cannot be made, that is said once on stderr, messages are counted, and nothing is raised."""
    (tmp_path / "file").write_text("")
    log = MessageLog(tmp_path / "file", rank=0)
    log.info("a")
    log.info("b")
    log.close()
    assert log.lost == 2
    error = capsys.readouterr().err
    assert error.count("cannot write") == 1
    assert str(log.path) in error


def test_without_stderr(tmp_path, monkeypatch):
    """A program without stderr can log warnings."""
    log = MessageLog(tmp_path, rank=0)
    monkeypatch.setattr(sys, "stderr", None)
    log.warning("w")
    log.close()
    assert found(log) == [("WARNING", "w")]
