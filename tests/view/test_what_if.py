"""What replays say, as the terminal, JSON and the page show it."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
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


def rewritten(trace, keep, **columns):
    """Write a trace again: the rows for which ``keep(kind, rank, step, number)`` holds, with some columns replaced."""
    table = pq.read_table(trace).to_pylist()
    rows = [row | columns for row in table if keep(row["optype"], row["rank"], row["step"], row["seq_id"])]
    pq.write_table(pa.Table.from_pylist(rows), trace)
    return trace


@pytest.mark.parametrize("missing", ["backward-compute", "optimizer", "forward-compute"])
def test_incomplete_steps_are_left_out(tmp_path, capsys, missing):
    """A step in which a worker lacks what it has in others is not averaged with them, and the report says so."""
    job = MadeJob(3, 2, steps=4, compute=slow_rank).write(tmp_path / "job.parquet")
    assert main(["report", str(job), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["what_if"]
    lacking = rewritten(job, lambda kind, rank, step, number: (kind, rank, step, number) != (missing, 4, 33, 0))
    assert main(["report", str(lacking), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["what_if"]["steps"] == 3
    assert value["what_if"]["replayed"] == pytest.approx(whole["replayed"])
    assert "1 incomplete step of 4 left out of the replays" in [remark["text"] for remark in value["remarks"]]


@pytest.mark.parametrize(
    ("keep", "columns", "message"),
    [
        (lambda kind, *_: kind != "backward-compute", {}, "no step of the trace is complete (steps: 2); every worker"),
        (lambda *_: True, {"mb_id": -1}, "no step of the trace is complete"),
        (lambda *_: True, {"duration": 0.0}, "a step takes no time in the replay"),
    ],
)
def test_nothing_to_replay(trace, capsys, keep, columns, message):
    """Where no step can be replayed, that is the answer, not a number."""
    assert main(["report", str(rewritten(trace, keep, **columns))]) == 2
    assert message in capsys.readouterr().err


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
