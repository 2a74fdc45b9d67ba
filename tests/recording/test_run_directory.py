"""Where a run goes: new, used, shared and unusable directories."""

import itertools
import json
import os
from pathlib import Path

import pytest

from pipesight.recording import observe
from pipesight.runs.directory import RunDirectory
from pipesight.stats import ConfigError
from support.observed import STATS, pipeline, tasks, train


def test_directory_of_another_recording(run, caplog):
    """A recording is left alone: the next goes beside it, with a number, unless it is to be replaced."""
    for number, where in enumerate(["RUN", "RUN-2", "RUN-3"], 1):
        with observe(run, stats=STATS) as recording:
            train(pipeline(), number)
        assert recording.path == run.with_name(where)
        assert {e["args"]["step"] for e in tasks(recording.path)} == set(range(number))
    assert [record.message for record in caplog.records] == [
        f"{run} already holds a recording; this one goes into {run}-{number}" for number in (2, 3)
    ]
    (run / "mine.txt").write_text("mine")
    with observe(run, overwrite=True) as recording:
        train(pipeline(), 4)
    assert recording.path == run
    assert {e["args"]["step"] for e in tasks(run)} == {0, 1, 2, 3}
    assert not (run / "stats/rank-00000.jsonl").exists()
    assert (run / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"stats": "nope.yaml"}, FileNotFoundError),
        ({"stats": "broken.yaml"}, ConfigError),
        ({"stats": {"all": {"enabled": True, "layers": {"layer_types": "all"}, "LogTensorStat": {}}}}, ConfigError),
        ({"max_bytes": float("inf")}, ValueError),
        ({"max_bytes": 2**70}, ValueError),
    ],
)
def test_what_is_refused_replaces_nothing(run, monkeypatch, wrong, error):
    """A recording is replaced only by one that begins: a mistake in an argument leaves every file as it was."""
    with observe(run, stats=STATS):
        train(pipeline(), 1)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert len(before) == 4
    monkeypatch.chdir(run.parent)
    Path("broken.yaml").write_text("all: [")
    with pytest.raises(error), observe(run, overwrite=True, **wrong):
        pytest.fail("went on")
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_directory_of_something_else(run):
    """A run is not mixed with what is no recording."""
    run.mkdir()
    (run / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"must be empty, but .* holds 'mine.txt'"), observe(run):
        pytest.fail("went on")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_agree_on_a_number(run, monkeypatch, ranks):
    """The ranks that one torchrun starts take the same directory, in any order, whatever was recorded before."""

    def claim(rank, launch, *, pid=1, local=2, **settings):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_a/{launch}/attempt_0/{rank}/error.json")
        directory = RunDirectory(run)
        directory.claim(**settings)
        directory.description.parent.mkdir(exist_ok=True)
        facts = {"rank": rank, "restart": directory.restart, "launch": directory.launch, "pid": pid}
        directory.description.write_text(json.dumps(facts))
        return directory.path.name

    for rank in range(ranks):
        assert claim(rank, "one", pid=os.getpid()) == "RUN"
    assert [claim(rank, "two", pid=os.getpid()) for rank in (1, 0)] == ["RUN-2", "RUN-2"]
    assert [claim(rank, "two", pid=os.getpid()) for rank in (1, 0)] == ["RUN-3", "RUN-3"]  # the same processes again
    assert [claim(rank, "three") for rank in (0, 1)] == ["RUN-4", "RUN-4"]
    assert [claim(rank, "three") for rank in (0, 1)] == ["RUN-4", "RUN-4"]  # started anew
    with pytest.raises(FileExistsError, match="record into another one"):  # of several machines
        claim(0, "four", local=1)
    for launch in ("five", "six"):
        (run / "logs").mkdir(exist_ok=True)
        for rank in (1, 0):  # whichever comes first
            (run / f"logs/rank-{rank:05}.log").touch()
            assert claim(rank, launch, overwrite=True) == "RUN"
        assert not any((run / "logs").iterdir())
        assert json.loads((run / "run.json").read_text())["restart"] == 0


def test_ranks_that_start_while_rank_0_claims_the_directory(run, monkeypatch):
    """What other ranks write while rank 0 looks whether the directory is free is not taken for that of another run."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "100")
    plain_rglob, others = Path.rglob, itertools.count(1)

    def rglob(self, pattern):
        (run / "ranks").mkdir(parents=True, exist_ok=True)
        (run / "ranks" / f"rank-{next(others):05}.json").write_text("{}")
        return plain_rglob(self, pattern)

    monkeypatch.setattr(Path, "rglob", rglob)
    run.mkdir()
    RunDirectory(run).claim()
    (run / "other.txt").write_text("of another run")
    with pytest.raises(FileExistsError, match=r"must be empty, but .* holds 'other.txt'"):
        RunDirectory(run).claim()


def test_directory_that_is_a_file(run):
    """A file cannot be a run directory."""
    run.write_text("")
    with pytest.raises(FileExistsError, match="must be a folder"), observe(run):
        pytest.fail("went on")


def test_empty_directory(run):
    """An empty folder will do."""
    run.mkdir()
    with observe(run):
        train(pipeline(), 1)
    assert tasks(run)
