"""Runs that torchrun restarted: a report is of one attempt, says which, and how to see another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.report import Report
from pipesight.runs.following.follower import Follower
from pipesight.runs.reading.run import open_run
from pipesight.view.report_json import as_json
from pipesight.view.text_report import render
from support.commands import pipesight
from support.synthetic import Made

RANKS = 2


def attempt_of(folder: Path, number: int, *, steps: int, hosts: tuple[str, str] = ("here", "here")) -> None:
    """Write an attempt over those before, as the ranks of a run do; its tasks take a millisecond more each time."""
    made = Made(folder, chunks=2, restart=number, outcome="ok", host=hosts[0])
    at = 10_000_000 * number
    for step in range(steps):
        at = made.gpipe(step, lambda *_: 1000 * (number + 1), at=at)
    events = made.events.pop(0)
    made.events = {rank: [e for e in events if e["args"]["partition"] == rank] for rank in range(RANKS)}
    for rank in range(RANKS):
        for event in made.events[rank]:
            event["pid"] = 4000 + 100 * number + rank
        made.stat("l0", "weight", "mean", number, 0.5, rank=rank)
        made.log(f"2023-11-14 22:13:20,000 INFO train of attempt {number}", rank=rank)
    made.ranks = {1: {"rank": 1, "restart": number, "pid": 4001 + 100 * number, "host": hosts[1]}}
    made.description["pid"] = 4000 + 100 * number
    before = {path: path.read_bytes() for path in folder.rglob("rank-*") if path.parent.name in ("trace", "logs")}
    for path in folder.glob("stats/rank-0000?.jsonl"):
        path.rename(path.with_name(f"{path.stem}-attempt-{number - 1}.jsonl"))
    made.write()
    if number:
        for path in [*folder.glob("trace/rank-0000?.pfw.gz"), *folder.glob("logs/rank-0000?.log")]:
            path.rename(path.with_name(path.name.replace(".", f"-restart-{number}.", 1)))
    for path, content in before.items():
        path.write_bytes(content)


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    for number, steps in enumerate((2, 3)):
        attempt_of(tmp_path / "run", number, steps=steps)
    return tmp_path / "run"


def analysed(path: Path, attempt: int | None = None) -> Report:
    with open_run(path, attempt=attempt) as run:
        return analyse(run)


@pytest.mark.parametrize(
    ("asked", "number", "steps", "words"),
    [
        (None, 1, 3, "Restarted once; this is attempt 1, the last."),
        (1, 1, 3, "Restarted once; this is attempt 1, the last."),
        (0, 0, 2, "Restarted once; this is attempt 0, not the last."),
    ],
)
def test_one_attempt_with_all_its_ranks(restarted, asked, number, steps, words):
    """By default the last attempt is reported, or the one asked for, each with its own tasks of all ranks."""
    report = analysed(restarted, asked)
    assert (report.attempt, report.attempts, report.ranks) == (number, (0, 1), (0, 1))
    assert report.steps.step.tolist() == list(range(steps))
    assert report.overall.time.median == 6000 * (number + 1)
    assert words in report.verdict.text
    assert "The run" not in report.verdict.text  # neither ended badly, nor did not end, as far as is known
    run = as_json(report)["run"]
    assert (run["attempt"], run["attempts"]) == (number, [0, 1])
    assert run["outcome"] == ("ok" if number == 1 else None)


def test_the_note_says_how_to_see_another(restarted):
    """There is one remark, with the command; the attempt itself is told near the top."""
    report = analysed(restarted)
    (remark,) = (remark for remark in report.remarks if "attempt" in remark.text)
    assert remark.text == f"not in this report: attempt 0; to see 0: pipesight report {restarted} --attempt 0"
    shown = render(report, width=200)
    assert shown.index("this is attempt 1, the last") < shown.index("Step time")


@pytest.mark.parametrize(("asked", "number"), [(None, 1), (0, 0)])
def test_statistics_and_log_lines_of_the_attempt(restarted, asked, number):
    """Statistics and log lines of other attempts do not mix with those of the one that is read."""
    with open_run(restarted, attempt=asked) as run:
        assert [(line["rank"], line["iteration"]) for line in run.statistics()] == [(0, number), (1, number)]
        assert [(line.rank, line.message) for line in run.log_lines()] == [
            (rank, f"of attempt {number}") for rank in range(RANKS)
        ]


def test_an_attempt_that_is_not_there(restarted):
    """The error lists those that are."""
    with pytest.raises(ValueError, match=r"no attempt 2 in .* \(attempts: 0, 1\)"):
        open_run(restarted, attempt=2)


def test_a_run_that_was_not_restarted(tmp_path):
    """Nothing is said of attempts where there is one."""
    attempt_of(tmp_path / "run", 0, steps=2)
    report = analysed(tmp_path / "run")
    assert "attempt" not in render(report)
    assert (report.attempt, report.attempts) == (0, (0,))
    with pytest.raises(ValueError, match=r"\(attempts: 0\)"):
        open_run(tmp_path / "run", attempt=1)


def test_children_of_an_attempt(restarted):
    """A process that a rank started in an attempt is of that attempt, and not taken for the rank itself."""
    before = [analysed(restarted, asked).events for asked in (0, 1)]
    other = Made(restarted.parent / "other")
    other.span("dataloader", "fetch", begin=0, dur=10)
    (child,) = other.write().glob("trace/*")
    for name in ("rank-00000-4711", "rank-00000-restart-1-4712", "rank-00000-restart-1-4713"):
        (restarted / "trace" / f"{name}.pfw.gz").write_bytes(child.read_bytes())
    for asked, children in ((0, 1), (1, 2)):
        report = analysed(restarted, asked)
        assert report.events == before[asked] + children
        assert sum("attempt" in remark.text for remark in report.remarks) == 1  # of the other one
        assert len(report.steps) == (2, 3)[asked]


def test_an_attempt_without_a_trace(restarted):
    """If the last attempt got nowhere, the one before is reported, without what is known of the last."""
    description = json.loads((restarted / "run.json").read_text())
    (restarted / "run.json").write_text(json.dumps({**description, "restart": 2, "outcome": "OSError: disk"}))
    report = analysed(restarted)
    assert "Restarted twice; this is attempt 1, the last that left a trace." in report.verdict.text
    assert "OSError" not in report.verdict.text


def test_nodes_that_count_restarts_differently(tmp_path):
    """A rank on another node may have been told another number, in the same attempt; its own description says so."""
    run = tmp_path / "run"
    attempt_of(run, 0, steps=2)
    attempt_of(run, 1, steps=3, hosts=("here", "there"))
    (run / "trace/rank-00001-restart-1.pfw.gz").replace(run / "trace/rank-00001.pfw.gz")
    facts = json.loads((run / "ranks/rank-00001.json").read_text())
    (run / "ranks/rank-00001.json").write_text(json.dumps({**facts, "restart": 0}))
    report = analysed(run)
    assert (report.attempt, report.ranks, len(report.steps)) == (1, (0, 1), 3)


def test_traces_without_a_run(restarted):
    """A folder of traces alone has attempts as well, by the names of the files; one trace has no others."""
    traces = restarted.parent / "traces"
    (restarted / "trace").rename(traces)
    assert [len(analysed(traces, asked).steps) for asked in (None, 0, 1)] == [3, 2, 3]
    alone = analysed(traces / "rank-00000-restart-1.pfw.gz")
    assert "attempt" not in alone.verdict.text


def test_from_the_command_line(restarted):
    """`--attempt` is there for the report and its page; what is not there ends with exit code 2."""

    done = pipesight("report", restarted, "--attempt", 0, "--json", "--html")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"]["attempt"] == 0
    assert (restarted / "report.html").is_file()
    wrong = pipesight("report", restarted, "--attempt", 7)
    assert wrong.returncode == 2
    assert "no attempt 7" in wrong.stderr
    assert "(attempts: 0, 1)" in wrong.stderr


# A run that is followed while torchrun restarts it.


def followed(follower: Follower) -> tuple[list[int], set[int], set[str], list[int]]:
    """Return the steps that a follower shows, how long tasks take, what logs say, and of when statistics are."""
    run = follower.run
    tasks = run.tasks()
    logs = {line.message for line in run.log_lines()}
    return run.steps(), {*(tasks.end - tasks.begin).tolist()}, logs, [e["iteration"] for e in run.statistics()]


def test_the_last_attempt_is_followed(restarted):
    """What is watched is what is reported: one attempt, and the verdict says which."""
    follower = Follower(restarted)
    try:
        follower.look()
        assert follower.state.phase == "ended"
        assert followed(follower) == ([0, 1, 2], {2000}, {"of attempt 1"}, [1, 1])
        shown, reported = analyse(follower.run), analysed(restarted)
        assert shown.verdict.text == reported.verdict.text
        assert (shown.attempt, shown.attempts, shown.events) == (1, (0, 1), reported.events)
    finally:
        follower.close()


def test_a_restart_is_followed(tmp_path):
    """Nothing of the attempt before is left when run.json is of the next; until then, nothing of that is shown."""
    folder = tmp_path / "run"
    attempt_of(folder, 0, steps=2)
    before = (folder / "run.json").read_text()
    going_on = json.dumps({**json.loads(before), "ended": None, "outcome": None})
    (folder / "run.json").write_text(going_on)
    follower = Follower(folder)
    try:
        for _ in range(2):
            follower.look()
        first = ([0], {1000}, {"of attempt 0"}, [0, 0])
        assert followed(follower) == first
        attempt_of(folder, 1, steps=3)
        after = (folder / "run.json").read_text()
        (folder / "run.json").write_text(going_on)  # rank 0 is later than others
        follower.look()
        assert followed(follower)[:3] == first[:3]
        (folder / "run.json").write_text(after)
        follower.look()
        assert followed(follower) == ([0, 1, 2], {2000}, {"of attempt 1"}, [1, 1])
    finally:
        follower.close()


def test_nodes_that_count_restarts_in_their_own_way_are_followed(tmp_path):
    """Files of a rank on another node have its own number, as in the report."""
    folder = tmp_path / "run"
    attempt_of(folder, 0, steps=2, hosts=("here", "there"))
    attempt_of(folder, 1, steps=3, hosts=("here", "there"))
    facts = json.loads((folder / "ranks/rank-00001.json").read_text())
    (folder / "ranks/rank-00001.json").write_text(json.dumps({**facts, "restart": 2}))
    for path in [*folder.glob("*/rank-00001-restart-1.*")]:
        path.rename(path.with_name(path.name.replace("restart-1", "restart-2")))
    follower = Follower(folder)
    try:
        follower.look()
        assert followed(follower)[:2] == ([0, 1, 2], {2000})
        assert analyse(follower.run).ranks == analysed(folder).ranks == (0, 1)
    finally:
        follower.close()
