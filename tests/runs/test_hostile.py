"""Runs that somebody else made: pipes, devices, sockets, folders and links in the place of files are not read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from pathlib import Path

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.cli.command import main
from pipesight.runs.following.follower import Follower
from pipesight.runs.reading.run import open_run
from pipesight.view.live.live_page import draw
from support.synthetic import Made

SECRET = "nobody's business"


def made(folder: Path) -> Path:
    """Make a run of two ranks that has a file of every kind."""
    run = Made(folder, balance=[1, 1], chunks=2, outcome="ok")
    at = 0
    for step in range(4):
        for rank in range(2):
            end = run.gpipe(step, lambda *_: 100, at=at, rank=rank)
        at = end + 100
        run.stat("l0", "activation", "mean", step, 0.5)
        run.log(f"2023-11-14T22:13:20.000000+00:00 INFO train [step {step}] a line")
    run.ranks[1] = {"rank": 1, "pid": 4001, "host": "there"}
    return run.write()


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "refused: it is a pipe, not a file"


def device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "refused: it is a device, not a file"


def connection(path: Path) -> str:
    listening = socket.socket(socket.AF_UNIX)
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket must be short
    try:
        listening.bind(path.name)
    finally:
        os.chdir(before)
        listening.close()
    return "refused: it is a socket, not a file"


def folder(path: Path) -> str:
    path.mkdir()
    return "refused: it is a folder, not a file"


def link(path: Path) -> str:
    elsewhere = path.parents[2] / "elsewhere"
    elsewhere.write_text(json.dumps({"iteration": 0, "layer": SECRET, "outcome": SECRET, "rank": 1}) + "\n")
    path.symlink_to(elsewhere)
    return "refused: it is a link to a file outside the run"


def nowhere(path: Path) -> str:
    path.symlink_to(path.with_name("nothing"))
    return "refused: it is a broken link"


def called(*arguments: object) -> tuple[int, str, str]:
    """Call a command; return its exit code, and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("file", "put"),
    [
        *(("run.json", put) for put in (pipe, device, connection, folder, link, nowhere)),
        *(("trace/rank-00001.pfw.gz", put) for put in (pipe, folder, link)),
        *(("stats/rank-00000.jsonl", put) for put in (pipe, device, link)),
        *(("logs/rank-00000.log", put) for put in (connection, link)),
        *(("ranks/rank-00001.json", put) for put in (pipe, nowhere, link)),
    ],
)
def test_what_is_no_file_of_the_run(tmp_path, file, put):
    """It is refused in one line, whoever reads the run; a run without its description is refused as a whole."""
    run = made(tmp_path / "folder" / "run")
    (run / file).unlink()
    why = f"{run / file}: {put(run / file)}"
    for command in (["report"], ["plan"], ["convert", "--to", "parquet", "-o", tmp_path / "made"]):
        name, *options = command
        code, out, err = called(name, run, *options)
        assert SECRET not in out + err
        assert "Traceback" not in err
        if file == "run.json":
            assert (code, out, err) == (2, "", f"pipesight {name}: error: {why}\n")
        elif name == "report":
            assert code == 0
            assert why.replace(" ", "").replace("\n", "") in out.replace(" ", "").replace("\n", "")
    for path in (tmp_path / "made").rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or SECRET not in path.read_bytes().decode(errors="replace")
    for name in ("view", "watch"):
        if file == "run.json":
            assert called(name, run) == (2, "", f"pipesight {name}: error: {why}\n")
    if file != "run.json":
        follower = Follower(run, quiet=0)
        with contextlib.closing(follower):
            follower.look()
            assert SECRET not in json.dumps(draw(follower))
            assert follower.state.phase == "ended"


@pytest.mark.timeout(60)
def test_convert_refuses_what_is_no_trace(tmp_path):
    """To Chrome, what is no file is left out with a line; alone, it is refused."""
    run = made(tmp_path / "folder" / "run")
    (run / "trace/rank-00001.pfw.gz").unlink()
    pipe(run / "trace/rank-00001.pfw.gz")
    code, _, err = called("convert", run, "-o", tmp_path / "trace.json")
    assert code == 0
    assert "refused: it is a pipe, not a file" in err
    code, out, err = called("convert", run / "trace/rank-00001.pfw.gz")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


def test_links_within_a_run_are_followed(tmp_path):
    """A link that ends in the run is as good as the file; so is a link to the run itself."""
    run = made(tmp_path / "run")
    (run / "stats/rank-00000.jsonl").rename(run / "values")
    (run / "stats/rank-00000.jsonl").symlink_to("../values")
    (tmp_path / "other").symlink_to("run")
    with open_run(tmp_path / "other") as opened:
        assert len([*opened.statistics()]) == 4
        assert opened.notes == []


def test_a_page_goes_through_no_link(tmp_path):
    """Where the page is made stands no link that somebody put there: only the name of the page is replaced."""
    run = made(tmp_path / "run")
    mine = tmp_path / "mine"
    mine.write_text(SECRET)
    (run / "report.html").symlink_to(mine)
    assert called("report", run, "--html")[0] == 0
    assert mine.read_text() == SECRET
    assert not (run / "report.html").is_symlink()


@pytest.mark.parametrize("wrong", [1, "x", None, {}, [[]], True])
def test_hosts_that_are_none(tmp_path, wrong):
    """Whatever run.json and the other ranks say of hosts and ranks, there is a report."""
    run = made(tmp_path / "run")
    for file in (run / "run.json", run / "ranks/rank-00001.json"):
        facts = json.loads(file.read_text())
        file.write_text(json.dumps({**facts, "hosts": wrong, "host_of_rank": wrong, "rank": wrong, "host": wrong}))
    assert called("report", run)[0] == 0


@pytest.mark.parametrize("ends", [5, [], {"1": 5}, {"x": {"outcome": "SIGTERM"}, "1": {"outcome": "  "}}])
@pytest.mark.parametrize("outcome", [None, "SIGTERM", " "])
def test_how_ranks_ended_is_only_taken_from_them(ends, outcome, tmp_path):
    """`run.json` cannot say how other ranks ended; whatever is there instead, the report is made."""
    path = made(tmp_path / "run")
    description = json.loads((path / "run.json").read_text()) | {"ends": ends, "outcome": "SIGTERM", "ended": None}
    (path / "run.json").write_text(json.dumps(description))
    rank = {"rank": 1, "pid": 4001, "host": "there", "outcome": outcome}
    (path / "ranks/rank-00001.json").write_text(json.dumps(rank))
    with open_run(path) as run:
        assert run.description["ends"] == {1: {key: rank.get(key) for key in run.description["ends"][1]}}
        assert "bubble" in analyse(run).verdict.text
