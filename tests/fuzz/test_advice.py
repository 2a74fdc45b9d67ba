"""Runs of any kind, however few steps they have and wherever they end: numbers that make sense, or one line that says
why there are none."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.cli.command import main
from pipesight.plan import NoTasksError, best_plans, measure, settings
from pipesight.report.analysis.analysing import analyse
from pipesight.report.reading.run import open_run
from synthetic import Made

TIMES = st.sampled_from([0, 1, 7, 100, 5000])


@st.composite
def runs(draw):
    """A run directory in the making, and whether its process was killed."""
    n, m = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(1, 2), min_size=n, max_size=n))
    made = Made(Path("run"), balance=layers, chunks=m)
    if draw(st.booleans()):
        made.description["processors"] = draw(st.integers(1, 4))
    if draw(st.booleans()):
        made.description["pipelines"] = []
    times = {(phase, j): draw(TIMES) for phase in ("forward", "recompute", "backward") for j in range(n)}
    ends = np.cumsum(layers)
    names = (lambda j: [f"l{k}" for k in range(ends[j] - layers[j], ends[j])]) if draw(st.booleans()) else None
    again = draw(st.sampled_from([0, max(m - 1, 0), m]))
    at = minibatch = 0
    for step in range(draw(st.integers(0, 6))):
        for kind in draw(st.sampled_from(["t", "t", "t", "e", "te", "tt", "d", ""])):
            minibatch += 1
            if kind == "d":  # the data alone
                made.span("dataloader", "fetch", begin=at, dur=50)
                at += 60
                continue
            before = len(made.events.get(0, []))
            slow = draw(st.sampled_from([1, 1, 1, 3]))
            time = lambda phase, i, j, slow=slow: slow * times[phase, j]
            at = made.gpipe(step, time, at=at, checkpointed=again, layers=names)
            own = made.events[0][before:]
            for event in own:
                event["args"]["minibatch"] = minibatch
            if kind == "e":
                made.events[0][before:] = [event for event in own if event["name"].startswith("forward")]
        if draw(st.booleans()):
            made.span("compute", "step", begin=at + 5, dur=40)
        at += draw(st.sampled_from([0, 50, 400]))
    events = made.events.setdefault(0, [])
    killed = draw(st.booleans())
    if killed and events:
        events.sort(key=lambda event: event["ts"] + event["dur"])
        del events[draw(st.integers(0, len(events))) :]
    return made, killed


@given(case=runs())
@cases.fuzz(60)
def test_any_run_is_reported_and_planned(case):
    """The report has no NaN in it; the plan has finite numbers, or is refused in one line."""
    made, killed = case
    with tempfile.TemporaryDirectory() as folder:
        made.folder = Path(folder) / "run"
        path = made.write(end=not killed)
        with open_run(path) as run:
            report = analyse(run)
        with open_run(path) as run:
            if report.measured is None:
                with pytest.raises(NoTasksError, match=r"\Athe run has no [^\n]+\Z"):
                    measure(run)
                cases.account("advice", "agreed: nothing to plan by")
                return
            found = measure(run)
    assert report.overall is not None
    assert 0 < found.step_seconds < math.inf
    assert 0 <= found.bubble <= 1
    assert found.steps >= 1
    plans = best_plans(found.costs, settings(found.costs, partitions=found.devices))
    assert plans
    for plan in plans:
        assert 0 <= plan.step_seconds < math.inf
        assert 0 <= plan.bubble <= 1
    cases.account("advice", "agreed")


def test_refusals_are_one_line(tmp_path, capsys):
    """A run that only evaluates, and one that failed in its first step, are refused by `pipesight plan`."""
    made = Made(tmp_path / "evaluated", balance=[1, 1], chunks=2)
    for j, i in ((j, i) for j in range(2) for i in range(2)):
        made.task(0, partition=j, microbatch=i, phase="forward", begin=100 * (i + j), dur=100)
    failed = Made(tmp_path / "failed", balance=[1, 1], chunks=2, outcome="ValueError: no")
    failed.gpipe(0, lambda *task: 100)
    del failed.events[0][-2:]
    for run in (made, failed):
        assert main(["plan", str(run.write())]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("pipesight plan: error: the run has no ")
        assert said.err.count("\n") == 1
