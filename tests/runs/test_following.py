"""A run that grows: each look reads what is new, shows whole steps, and knows when it has ended."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse
from pipesight.analysis.latest_step import steps_of
from pipesight.analysis.step_times import PARTS
from pipesight.runs.following import follower as following
from pipesight.runs.following import growing_file as _growing
from pipesight.runs.following import recent_run as _recent
from pipesight.runs.following.follower import Follower, check_place
from pipesight.runs.reading.run import NotARunError, open_run
from support.growing import GrowingRun, recorder
from support.synthetic import Made


@pytest.fixture
def run(tmp_path):
    return GrowingRun(tmp_path / "run", balance=[1, 2], chunks=2)


@pytest.fixture
def follow():
    """Makes followers, and closes them."""
    made = []

    def make(path, **options):
        made.append(Follower(path, **options))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


def same(one, other) -> bool:
    """Tell whether two tables are equal, row for row."""
    columns = other.columns()
    return all(np.array_equal(column, columns[name]) for name, column in one.columns().items())


# Whole steps.


def test_from_nothing(run, follow):
    """A run is waited for, begins, and ends when run.json says so, with all its steps."""
    follower = follow(run.folder)
    assert not follower.look()
    assert follower.state.phase == "waiting"
    run.begin()
    assert follower.look()
    assert follower.state.phase == "running"
    assert follower.run.description["pid"] == os.getpid()
    run.step()
    run.end("ValueError: too bad")
    assert follower.look()
    assert (follower.state.phase, follower.state.outcome) == ("ended", "ValueError: too bad")
    assert follower.run.steps() == [0]
    assert not follower.look()


def test_whole_steps(run, follow):
    """A step is shown when the next has begun, one look later; the last when the run has ended."""
    follower = follow(run.begin().folder)
    shown = []
    for _ in range(3):
        run.step()
        follower.look()
        shown.append(follower.run.steps())
    follower.look()
    assert [*shown, follower.run.steps()] == [[], [], [0], [0, 1]]
    assert set(follower.run.tasks().step.tolist()) == {0, 1}
    run.end()
    follower.look()
    assert set(follower.run.tasks().step.tolist()) == {0, 1, 2}


def test_program_without_a_pipeline(tmp_path, follow):
    """Steps of any program are shown as they end, each as long as it is in the report of the whole run."""
    run = GrowingRun(tmp_path / "run", pipelines=[]).begin()
    follower, shown, times = follow(run.folder), [], {}
    for number in range(5):
        at = number * (1_000 + number)
        run.span("dataloader", "fetch", begin=at, dur=100, step=number, samples=4)
        run.span("compute", "backward", begin=at + 200, dur=500, module="Net", depth=0, step=number)
        run.span("mine", "metrics", begin=at + 700, dur=50)
        run.span("compute", "step", begin=at + 750, dur=50, step=number)
        run.flush()
        follower.look()
        shown.append(follower.run.steps())
        if shown[-1]:
            times |= {step.step: (step.time, step.parts) for step in steps_of(analyse(follower.run))}
    assert shown == [[], [], [0], [0, 1], [0, 1, 2]]
    run.end()
    with open_run(run.folder) as opened:
        steps = steps_of(analyse(opened))
    assert times == {step.step: (step.time, step.parts) for step in steps if step.step < 3}
    assert [step.time for step in steps] == [1_001, 1_003, 1_005, 1_007]


def test_slowest_rank(run, follow):
    """With several ranks, a step is shown when all of them have gone on."""
    run.begin()
    follower = follow(run.folder)
    run.step(ranks=2)
    run.step(ranks=2)
    run.step(ranks=1)
    for _ in range(2):
        follower.look()
    assert follower.run.steps() == [0]
    assert follower.run.ranks() == [0, 1]


def test_nothing_new(run, follow):
    """A look at what has not changed has nothing to show."""
    follower = follow(run.begin().folder)
    run.step()
    run.step()
    while follower.look():
        pass
    assert follower.run.steps() == [0]
    assert not follower.look()


def test_recorded(tmp_path, follow):
    """What a traced process writes is read as it comes."""
    with recorder(tmp_path / "run") as process:
        process.step()
        process.step()
        follower = follow(tmp_path / "run")
        for _ in range(2):
            follower.look()
        assert follower.run.steps() == [0]
        assert len(follower.run.tasks()) == 4
        process.end()
        follower.look()
        assert follower.state.phase == "ended"
        assert follower.run.steps() == [0, 1]


# As of any other run.


def test_same_as_on_disk(run, follow):
    """Once it has ended, everything is as if it had been opened then."""
    run.begin()
    follower = follow(run.folder)
    for step in range(4):
        run.step(ranks=2, write=False)
        run.transfer(step, partition=1, microbatch=0, begin=step * 10_000, dur=50)
        run.task(step, partition=0, microbatch=0, phase="forward", begin=1, dur=3, device="cuda:0", layers={"l0": 2})
        run.span("dataloader", "fetch", begin=step * 10_000 + 7, dur=2)
        run.flush()
        follower.look()
    run.end()
    follower.look()
    with open_run(run.folder) as whole:
        mine = follower.run
        assert mine.steps() == whole.steps()
        assert mine.ranks() == whole.ranks()
        assert mine.events == whole.events
        assert same(mine.tasks(), whole.tasks())
        assert same(mine.tasks(range(1, 3)), whole.tasks(range(1, 3)))
        assert same(mine.transfers(), whole.transfers())
        assert same(mine.spans(), whole.spans())
        assert same(mine.layer_times(), whole.layer_times())
        assert same(mine.layer_runs(2), whole.layer_runs(2))
        assert same(mine.names(), whole.names())


def test_statistics(run, follow):
    """Statistics come as their lines say, and half a line waits for the rest."""
    follower = follow(run.begin().folder)
    run.measure(layer="a", value=1.0)
    run.measure(layer="b", value=None, nonfinite="nan", nans=1)
    run.measure(layer="c", value=1.0, nans=3)
    with (run.folder / "stats/rank-00000.jsonl").open("a") as file:
        file.write('no JSON\n{"layer": ')
    assert follower.look()
    assert [entry["layer"] for entry in follower.run.statistics()] == ["a", "b", "c"]
    with (run.folder / "stats/rank-00000.jsonl").open("a") as file:
        file.write('"d"}\n')
    assert follower.look()
    assert [entry["layer"] for entry in follower.run.statistics()] == ["a", "b", "c", "d"]


def test_first_nonfinite(run, follow, monkeypatch):
    """Old statistics make room for new ones, but for the first that were not finite."""
    monkeypatch.setattr(_recent, "MOST_STATISTICS", 4)
    follower = follow(run.begin().folder)
    for iteration in range(3):
        run.measure(iteration=iteration, layer="a", tensor="output", value=1.0)
    for layer in "bc":
        run.measure(iteration=3, layer=layer, tensor="output", value=None, nonfinite="nan", nans=1)
    follower.look()
    assert [entry["layer"] for entry in follower.run.statistics()] == ["a", "a", "b", "c"]
    for iteration in range(4, 9):
        run.measure(iteration=iteration, layer="d", tensor="output", value=None, nonfinite="inf", infs=1)
    follower.look()
    assert [entry["layer"] for entry in follower.run.statistics()] == ["b", "c", "d", "d", "d", "d"]


def test_last_step(run, follow):
    """The last step that is shown ends where the next begins, and what came after is none of it."""
    run.begin()
    for _ in range(4):
        run.step()
    run.span("compute", "step", begin=10**9, dur=5)
    run.flush()
    follower = follow(run.folder)
    for _ in range(2):
        follower.look()
    report = analyse(follower.run)
    assert "not ended" not in report.verdict.text  # who follows it says so
    steps = report.steps
    assert steps.step.tolist() == [0, 1, 2]
    assert len(set(steps.period.tolist())) == 1
    run.end()
    follower.look()
    assert analyse(follower.run).steps.period[3] > 10**8


def test_loading_before_the_next_step(run, follow):
    """A batch is fetched as part of the next step; the time that it takes is that of the last step that is shown."""
    run.begin()
    for step in range(4):
        run.step(write=False)
        run.span("dataloader", "fetch", begin=run._at, dur=300, step=step + 1)
        run._at += 400
        run.flush()
    follower = follow(run.folder)
    for _ in range(2):
        follower.look()
    steps = analyse(follower.run).steps
    assert steps.step.tolist() == [0, 1, 2]
    assert steps.parts[PARTS.index("data_loading")].tolist() == [300] * 3


def test_log_lines(run, follow):
    """Log lines are read with their place in the pipe, whatever bytes are in them."""
    follower = follow(run.begin().folder)
    run.say("2026-11-15T10:00:00.123456 INFO pipesight.pipeline [step 3 partition 1 micro-batch 0 forward] hello")
    with (run.folder / "logs/rank-00000.log").open("ab") as file:
        file.write(b"and \xff more\n")
    assert follower.look()
    (line,) = follower.run.log_lines()
    assert (line.step, line.partition, line.message) == (3, 1, "hello\nand \ufffd more")


# Files as they grow.


@pytest.mark.slow
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=12), compress=st.booleans())
def test_cut_anywhere(tmp_path_factory, cuts, compress):
    """However a file comes in, cut wherever, each event is read once."""
    run = GrowingRun(tmp_path_factory.mktemp("cut") / "run", balance=[1], chunks=2).begin()
    for _ in range(3):
        run.step()
    run.append("]\n")
    path = run.trace_of()
    whole = path.read_bytes() if compress else gzip.decompress(path.read_bytes())
    if not compress:
        path.unlink()
        path = path.with_suffix("")
    path.write_bytes(b"")
    follower = Follower(run.folder)
    for cut in [*sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]:
        path.write_bytes(whole[:cut]) if cut == 0 else append_until(path, whole, cut)
        follower.look()
    run.describe(ended="now")
    follower.look()
    try:
        assert follower.run.events == len(run.events[0])
        assert len(follower.run.tasks()) == 3 * 4
    finally:
        follower.close()


def append_until(path, whole: bytes, size: int) -> None:
    with path.open("ab") as file:
        file.write(whole[file.tell() : size])


def test_reads_only_what_is_new(run, follow, monkeypatch):
    """A look costs what was added since the last one, however long the run."""
    for _ in range(200):
        run.step(write=False)
    run.begin()
    run.flush()
    follower = follow(run.folder)
    read = []
    pread = os.pread
    monkeypatch.setattr(_growing.os, "pread", lambda *args: read.append(pread(*args)) or read[-1])
    follower.look()
    before = run.trace_of().stat().st_size
    read.clear()
    follower.look()
    assert sum(map(len, read)) == 0
    run.step()
    follower.look()
    assert sum(map(len, read)) == run.trace_of().stat().st_size - before


def test_newer_format(run, follow):
    """A run of a newer format is followed, with a warning."""
    run.begin()
    facts = json.loads((run.folder / "run.json").read_bytes())
    (run.folder / "run.json").write_text(json.dumps(facts | {"format_version": 2}))
    follower = follow(run.folder)
    follower.look()
    assert follower.state.phase == "running"
    (note,) = follower.run.notes
    assert "format version 2, but pipesight" in note.text


def test_damage(run, follow):
    """A member that is damaged costs its own events, not those after it; zeros cost none."""
    run.begin()
    run.step()
    good = run.trace_of().read_bytes()
    bad = bytearray(gzip.compress(b"x" * 1000, mtime=0))
    bad[12:20] = b"\xff" * 8
    with run.trace_of().open("ab") as file:
        file.write(bytes(bad))
    run.step()
    with run.trace_of().open("ab") as file:
        file.write(b"\0" * 5000)
    run.step()
    run.end()
    follower = follow(run.folder)
    follower.look()
    assert follower.run.steps() == [0, 1, 2]
    assert follower.run.events == len(run.events[0])
    (note,) = follower.run.notes
    assert note.path == run.trace_of()
    assert "skipped" in note.text
    assert len(good) < len(run.trace_of().read_bytes())


def test_parts_and_children(run, follow):
    """Parts that follow a file, and files of processes that a rank started, are read as they appear."""
    run.begin()
    follower = follow(run.folder)
    run.step()
    follower.look()
    first = run.trace_of()
    first.rename(first.with_name("rank-00000.part2.pfw.gz"))
    run._written.clear()
    first.write_bytes(b"")
    run.events[0].clear()
    run.step()
    child = Made(run.folder, balance=[1])
    child.event("dataloader", "fetch", begin=0, dur=5)
    text = "\n".join(["[", *map(json.dumps, child.events[0])]) + "\n"
    (run.folder / "trace/rank-00000-4711.pfw.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    for _ in range(2):
        follower.look()
    run.describe(ended="now")
    follower.look()
    assert follower.run.steps() == [0, 1]
    assert len(follower.run.spans()) == len(follower.run.spans().where(follower.run.spans().kind == 1))
    assert follower.run.names().name.tolist().count("fetch") == 1


def test_too_much_at_once(run, follow, monkeypatch):
    """Of a long run that is opened late, the end is read, and a note says so."""
    run.begin()
    for _ in range(400):
        run.step()
    run.end()
    monkeypatch.setitem(following._MOST, "trace", 2**16)
    assert run.trace_of().stat().st_size > 2**17
    follower = follow(run.folder)
    follower.look()
    steps = follower.run.steps()
    assert steps == list(range(steps[0], 400))
    assert 0 < steps[0] < 390
    assert "to keep up" in follower.run.notes[0].text


@pytest.mark.slow
def test_bounded(run, follow):
    """No more than the last steps are kept, however long it goes on."""
    run.begin()
    follower = follow(run.folder, steps=8)
    for _ in range(40):
        run.step()
        follower.look()
    steps = follower.run.steps()
    assert 6 <= len(steps) <= 10
    assert steps == list(range(steps[0], 38))
    tasks = follower.run.tasks()
    assert sorted(set(tasks.step.tolist())) == steps
    assert follower.run.spans().end.min() > tasks.begin.min()
    assert follower.run.events == len(run.events[0])


def test_another_run(run, follow):
    """A run that begins anew in the same folder is followed from its beginning."""
    run.begin()
    follower = follow(run.folder)
    for _ in range(3):
        run.step()
        follower.look()
    assert follower.run.steps() == [0]
    again = GrowingRun(run.folder, balance=[1, 2], chunks=2, started="2024-01-01T00:00:00+00:00")
    again.trace_of().unlink()
    again.begin()
    again.step(task=77)
    again.end()
    follower.look()
    assert follower.run.steps() == [0]
    assert set((follower.run.tasks().end - follower.run.tasks().begin).tolist()) == {77}


def test_gone(run, follow):
    """A folder that disappears while it is followed is no error."""
    run.begin()
    run.step()
    follower = follow(run.folder)
    follower.look()
    run.trace_of().unlink()
    (run.folder / "run.json").unlink()
    follower.look()
    assert follower.state.phase == "running"


def test_links(run, follow, tmp_path):
    """A link that leads out of the run is not followed."""
    other = GrowingRun(tmp_path / "other", balance=[1, 2], chunks=2).begin()
    other.step()
    other.say("secret")
    run.begin()
    run.trace_of().symlink_to(other.trace_of())
    (run.folder / "logs/rank-00000.log").symlink_to(other.folder / "logs/rank-00000.log")
    run.describe(ended="now")
    follower = follow(run.folder)
    follower.look()
    assert follower.run.steps() == []
    assert list(follower.run.log_lines()) == []


# How it ends.


@pytest.fixture
def look_at(run, follow):
    """Looks at the run at some time, in seconds, and returns the follower; 1000 of them without news are quiet."""
    now = [0.0]
    follower = follow(run.folder, clock=lambda: now[0], quiet=1000)

    def look(seconds: float) -> Follower:
        now[0] = seconds
        follower.look()
        return follower

    return look


def test_killed(run, look_at):
    """A run whose process is gone, and that has been quiet for a while, has ended; one whose process lives has not."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    run.description["pid"] = child.pid
    run.begin()
    run.step()
    assert look_at(0).state.phase == "running"
    follower = look_at(1001)
    assert follower.state.phase == "ended"
    assert "killed" in follower.state.outcome
    assert follower.run.steps() == [0]


@pytest.mark.parametrize("facts", [{}, {"host": "elsewhere", "pid": 1}, {"pid": None}, {"pid": 1}])
def test_not_killed(run, look_at, facts):
    """A run whose process lives, or about which nobody here can know, goes on however quiet it is."""
    run.begin()
    run.step()
    run.describe(**facts)
    look_at(0)
    assert look_at(1e6).state.phase == "running"


def test_other_ranks(run, look_at):
    """Where rank 0 has ended, the others get a while to write the rest."""
    run.begin()
    run.step(ranks=2)
    run.describe(world_size=2, ended="now")
    assert look_at(0).state.phase == "running"
    assert look_at(1001).state.phase == "ended"


def test_the_rank_that_was_killed_is_named(run, look_at):
    """Rank 0 says SIGTERM, by which torchrun ended it when rank 1 was gone."""
    run.begin()
    run.step(ranks=2)
    (run.folder / "ranks").mkdir()
    gone = {"rank": 1, "pid": 2**30, "host": os.uname().nodename, "ended": None, "outcome": None}
    (run.folder / "ranks" / "rank-00001.json").write_text(json.dumps(gone))
    run.describe(world_size=2, ended="now", outcome="SIGTERM")
    look_at(0)
    state = look_at(1001).state
    assert state.phase == "ended"
    assert state.outcome == "rank 1 was killed, or its machine went down; the others were then ended with SIGTERM"


def test_restarted(run, look_at):
    """An attempt that failed has not ended the run while its torchrun goes on: the next one is followed."""
    torchrun = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run.description.update(launch="job_1", ppid=torchrun.pid, restart=0)
        run.begin()
        run.step()
        run.describe(ended="now", outcome="SIGTERM")
        look_at(0)
        assert look_at(1001).state.phase == "running"
        again = GrowingRun(run.folder, balance=[1, 2], chunks=2, started="2024-01-01T00:00:00+00:00")
        again.description.update(launch="job_1", ppid=torchrun.pid, restart=1)
        again.begin()
        follower = look_at(1002)
        assert (follower.state.phase, follower.run.attempt.number) == ("running", 1)
        again.describe(ended="now", outcome="SIGTERM")
        assert look_at(1003).state.phase == "running"
    finally:
        torchrun.communicate(b"\n")
    follower = look_at(1003)
    assert (follower.state.phase, follower.state.outcome) == ("ended", "SIGTERM")


def test_not_restarted(run, look_at):
    """Of a torchrun elsewhere nobody knows whether it goes on; after a while it has ended. A run that went well has."""
    run.description.update(launch="job_1", ppid=1, host="elsewhere", ended="now", outcome="SIGTERM")
    run.begin()
    run.step()
    look_at(0)
    assert look_at(11_000).state.phase == "running"
    assert look_at(13_000).state.phase == "ended"


def test_went_well(run, look_at):
    """A run that went well is not started anew."""
    run.description.update(launch="job_1", ppid=os.getpid(), ended="now", outcome="ok")
    run.begin()
    run.step()
    assert look_at(0).state.phase == "ended"


def test_traces_alone(run, look_at):
    """A folder of traces without run.json has ended when each has its end and has been quiet for a while."""
    run.begin()
    (run.folder / "run.json").unlink()
    run.step()
    assert look_at(0).state.phase == "running"
    assert look_at(1001).state.phase == "running"
    run.append("]\n")
    assert look_at(1001).state.phase == "running"
    assert look_at(2002).state.phase == "ended"


def test_one_trace(run, follow):
    """A single trace can be followed, with its parts."""
    run.begin()
    run.step()
    run.step()
    follower = follow(run.trace_of())
    for _ in range(2):
        follower.look()
    assert follower.run.steps() == [0]


# Where a run can be.


def test_places(run, tmp_path):
    """A run, a trace, an empty folder and nothing at all may become runs; anything else does not."""
    check_place(tmp_path / "nothing")
    check_place(tmp_path)
    run.begin()
    check_place(run.folder)
    check_place(run.folder / "trace")
    (run.folder / "run.json").unlink()
    check_place(run.folder)
    run.step()
    check_place(run.trace_of())
    check_place(run.folder / "trace")
    text = tmp_path / "text"
    text.mkdir()
    (text / "notes.txt").write_text("hello")
    for path in (text, text / "notes.txt"):
        with pytest.raises(NotARunError, match=r"^not a run: "):
            check_place(path)
