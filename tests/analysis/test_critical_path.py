"""The critical path of a step: a chain that adds up to the step, of tasks that cannot be put off."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.test_links import SLOW, clocks
from analysis.test_links import made as linked
from pipesight.analysis.analyse import analyse
from pipesight.analysis.critical_path import critical_paths
from pipesight.runs.reading.run import open_run
from support.synthetic import START, Made


def paths_of(folder, steps):
    with open_run(folder) as run:
        return critical_paths(run, analyse(run), steps)


def chained(path, window):
    """Check that parts follow each other from the first task to the last operation, and add up to that."""
    assert path.parts[0].begin == 0
    assert path.parts[-1].end == window
    assert all(one.end == other.begin for one, other in itertools.pairwise(path.parts))
    assert sum(path.totals().values()) == pytest.approx(window)


def slack(times, n, m):
    """Return how long each task of GPipe can be put off, by the textbook: latest minus earliest begin."""
    tasks = [("forward", i, j) for i in range(m) for j in range(n)]
    tasks += [("backward", i, j) for i in reversed(range(m)) for j in reversed(range(n))]
    own = [[task for task in tasks if task[2] == j] for j in range(n)]
    before = {task: [] for task in tasks}
    for row in own:
        for one, other in itertools.pairwise(row):
            before[other].append(one)
    for phase, i, j in tasks:
        other = (phase, i, j - 1 if phase == "forward" else j + 1)
        if other in before:
            before[phase, i, j].append(other)
    early = {}
    for task in tasks:
        early[task] = max((early[one] + times[one] for one in before[task]), default=0)
    length = max(early[task] + times[task] for task in tasks)
    late = {task: length - times[task] for task in tasks}
    for task in reversed(tasks):
        for one in before[task]:
            late[one] = min(late[one], late[task] - times[one])
    return {task: late[task] - early[task] for task in tasks}, early, length


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(2, 5))
def test_a_pipeline_without_gaps(tmp_path_factory, seed, n, m):
    """The path has no task that could be put off, no gap, and is as long as the longest chain of dependencies."""
    draw = random.Random(seed)
    made = Made(tmp_path_factory.mktemp("path") / "run", balance=[1] * n, chunks=m)
    steps = []
    at = 0
    for step in range(3):
        times = {(p, i, j): draw.randint(20, 300) for p in ("forward", "backward") for i in range(m) for j in range(n)}
        at = made.gpipe(step, lambda phase, i, j, times=times: times[phase, i, j], at=at) + 100
        steps.append(times)
    found = paths_of(made.write(), range(3))
    for step, times in enumerate(steps):
        slacks, early, length = slack(times, n, m)
        assert found[step].follows == (step < 2)
        chained(found[step], length + 100 * (step < 2))
        assert {"forward", "backward"} <= set(found[step].totals()) <= {"forward", "backward", "gap"}
        *parts, last = found[step].parts
        assert last.kind == ("gap" if step < 2 else "backward")  # until the next step
        for part in [*parts, last] if step == 2 else parts:
            (task,) = [of for of in times if of[2] == part.partition and early[of] == part.begin]
            assert (task[0], slacks[task], times[task]) == (part.kind, 0, part.end - part.begin)


def test_messages_between_ranks(tmp_path):
    """Between ranks, messages are parts of the path, from when they were sent."""
    run = linked(tmp_path / "run", SLOW, clock=clocks(2000, 3000))
    for step, path in paths_of(run.write(), [3, 1]).items():
        chained(path, 3120)
        assert path.totals() == {"forward": 400, "backward": 800, "transfer": 1820, "optimizer": 100}
        assert [(p.kind, p.rank, p.begin) for p in path.parts if p.kind == "transfer"] == [
            ("transfer", 1, 100),
            ("transfer", 2, 210),
            ("transfer", 1, 1610),
            ("transfer", 0, 2610),
        ]
        assert path.step == step


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_anything_adds_up(tmp_path_factory, seed):
    """However long tasks wait, for messages, collectives or nothing that is known, the parts add up to the step."""
    draw = random.Random(seed)
    ranks = 3
    made = linked(
        tmp_path_factory.mktemp("path") / "run", {way: draw.randint(0, 900) for way in SLOW}, clock=clocks(0, 0)
    )
    late = draw.randint(1, 200)
    for events in made.events.values():  # what comes later in a step comes later still
        for place, event in enumerate(events):
            event["ts"] += late * (place % 50)
    tasks = [
        (e["args"]["step"], e["ts"], e["ts"] + e["dur"])
        for own in made.events.values()
        for e in own
        if e["name"] in ("forward", "backward")
    ]
    optimizers = [[e["ts"] + e["dur"] for e in own if e["name"] == "step"] for own in made.events.values()]
    assert len(made.events) == ranks
    begins = {step: min(begin for own, begin, _ in tasks if own == step) for step in range(5)}
    last = max(end for step, _, end in tasks if step == 4)
    for step, path in paths_of(made.write(), range(5)).items():
        until = begins[step + 1] if step < 4 else max(last, *(own[step] for own in optimizers))
        chained(path, until - begins[step])
        assert (path.begin, path.follows) == (begins[step], step < 4)


@pytest.mark.parametrize("loads", [0, 1, None])
def test_loading_holds_the_next_step_up(tmp_path, loads):
    """The batch of the next step is on the path of this one if a rank loads it before its first task begins.

    Rank 1 loads for longer, but its first task waits for rank 0 anyway: that is not on the path.
    """
    made, at = linked(tmp_path / "run", SLOW, clock=clocks(2000, 3000)), 3120
    every = {rank: list(events) for rank, events in made.events.items()}
    for rank, events in every.items():
        for event in events:
            event["ts"] += 400 * ((event["ts"] - START) // at)
        for step in range(1, 5):
            dur = {0: 300, 1: 390}.get(rank, 0) if loads == rank else 0
            if dur:
                made.span("dataloader", "fetch", begin=step * (at + 400) - dur, dur=dur, rank=rank, step=step)
    for path in paths_of(made.write(), range(4)).values():
        chained(path, at + 400)
        expected = {"data loading": 300, "gap": 100} if loads == 0 else {"gap": 400}
        assert path.totals() == {"forward": 400, "backward": 800, "transfer": 1820, "optimizer": 100} | expected
