"""What replays say, as the terminal, JSON and the page show it."""

from __future__ import annotations

import json

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.cli.command import main
from pipesight.runs.reading.run import open_run
from pipesight.view.page import page_payload
from support.made_jobs import MadeJob
from support.schemas import validated


def slow_rank(step, replica, task):
    return (0.2 if task[0] == "backward" else 0.1) * (2 if (replica, task[1]) == (1, 1) else 1)


@pytest.fixture
def trace(tmp_path):
    return MadeJob(3, 2, steps=2, compute=slow_rank).write(tmp_path / "job.parquet")


def test_terminal(trace, capsys):
    """The verdict comes first, then the replays, then each worker's slowdown, on lines that fit."""
    assert main(["report", str(trace), "--width", "70"]) == 0
    text = capsys.readouterr().out
    assert "Rank 4 slows the job by" in " ".join(text.split())
    assert text.index("Rank 4") < text.index("What if there were no stragglers") < text.index("Slowdown by worker")
    assert max(map(len, text.splitlines())) <= 70


def test_json(trace, capsys):
    """``what_if`` is as the schema says, and ``--steps`` limits it."""
    assert main(["report", str(trace), "--json", "--steps", "13"]) == 0
    value = validated("report", json.loads(capsys.readouterr().out))["what_if"]
    assert value["steps"] == 1
    assert value["by_worker"]["4"] == pytest.approx(value["slowdown"])
    assert value["causes"][0]["ranks"] == [4]
    assert value["layout"]["ranks"] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("options", [["--partition", "1"], ["--layer", "0"], ["--steps", "4:9"]])
def test_what_does_not_go(trace, capsys, options):
    """A trace of operations has no layers and only its steps."""
    assert main(["report", str(trace), *options]) == 2
    assert "pipesight report: error: " in capsys.readouterr().err


def test_page(trace):
    """The page has the slowdown of each worker, and says so once."""
    with open_run(trace) as run:
        payload = page_payload(run, analyse(run))
    drawn = payload["what_if"]
    assert drawn["verdict"] == payload["verdict"]["text"]
    assert drawn["slowdowns"][1][1] == pytest.approx(drawn["slowdown"], abs=1e-3)
    assert (drawn["dp_ranks"], drawn["stages"], drawn["left"]) == ([0, 1, 2], [0, 1], "")
    assert not payload["shown"]
