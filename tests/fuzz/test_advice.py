"""Runs of any kind, however few steps they have and wherever they end: numbers that make sense, or one line that says
why there are none."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import cases
from pipesight.analysis.analyse import analyse
from pipesight.analysis.plan_outcome import Outcome
from pipesight.cli.command import main
from pipesight.plan import NoTasksError, best_plans, measure, predict, settings
from pipesight.plan.plans import WORTH
from pipesight.runs.reading.run import open_run
from support.synthetic import Made

PARTS = {"num_workers": "data_loading", "fused": "optimizer", "between steps": "between_steps", "slows some": "jitter"}
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
@cases.fuzz(20)
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
    overall, changes = report.overall, report.verdict.changes
    assert overall is not None
    assert found.step_seconds == pytest.approx(overall.time.median * 1e-6)
    assert (found.bubble, found.steps) == (overall.bubble, overall.steps)
    counts = {found.devices} | ({min(found.processors, len(found.costs.layers))} if found.crowded else set())
    possible = [s for n in counts for s in settings(found.costs, partitions=n, recorded=found.schedule.chunks)]
    outcome = Outcome(found.costs, best_plans(found.costs, possible), found)
    for plan in outcome.plans:
        assert 0 <= plan.step_seconds < math.inf
        assert 0 <= plan.bubble <= 1
    agree(report, outcome)
    for change in changes:
        assert WORTH < change.gain <= 1
    for words, part in PARTS.items():
        for change in changes:
            if words in change.what:
                assert change.gain <= overall.parts[part] / overall.time.mean + 1e-9
    cases.account("advice", "agreed")


def agree(report, outcome):
    """Check that report and planner promise the same."""
    found, changes = outcome.measured, report.verdict.changes
    saves = {}
    for plan in outcome.plans:
        saves[plan.setting] = (1 - plan.step_seconds / max(outcome.baseline, 1e-12), plan.balance)
    planned = [
        change for change in changes if any(word in change.what for word in ("chunks=", "balance=", "checkpoint="))
    ]
    if outcome.keep() is not None:
        assert not planned
    elif found.setting is not None:
        assert changes
    if "Nothing" in report.verdict.text:
        assert outcome.keep() is not None
    for change in planned:
        setting = found.setting
        if setting is None or "," in change.what.replace(", ", " ").split("]")[-1]:
            continue
        if change.what.startswith("balance=") and " instead of " in change.what:
            assert change.gain == pytest.approx(saves[setting][0])
        elif change.what.startswith("checkpoint="):
            one = dataclasses.replace(setting, checkpoint="never")
            check_one(change, saves[one], found.balance)
        elif "chunks=" in change.what and " instead of " in change.what:
            chunks = int(change.what.split("chunks=")[1].split()[0])
            check_one(change, saves[dataclasses.replace(setting, chunks=chunks)], found.balance)
            assert change.gain == pytest.approx(best_chunks(outcome))
    if found.setting is not None and len(changes) < 3 and best_chunks(outcome) > WORTH + 1e-9:
        assert any("chunks=" in change.what for change in planned)


def splitting_pays(found):
    """Return whether two micro-batches, or those that were recorded, beat one that is recomputed as they are."""
    if found.setting.partitions == 1:
        return False
    kept = "always" if found.setting.checkpoint == "except_last" else found.setting.checkpoint
    one, two = (
        dataclasses.replace(found.setting, chunks=n, checkpoint=c)
        for n, c in ((1, kept), (2, found.setting.checkpoint))
    )
    seconds = [predict(found.costs, setting, found.balance).step_seconds for setting in (one, two)]
    return min(seconds[1], found.predicted_seconds) < seconds[0]


def best_chunks(outcome):
    """Return what the best number of chunks gains of those that may be advised, if all else stays as recorded."""
    found = outcome.measured
    others = [
        plan.setting
        for plan in outcome.plans
        if plan.setting == dataclasses.replace(found.setting, chunks=plan.setting.chunks)
        and plan.setting != found.setting
        and not (plan.setting.chunks == 1 and splitting_pays(found))
    ]
    times = [predict(found.costs, setting, found.balance).step_seconds for setting in others]
    return 1 - min(times, default=math.inf) / max(outcome.baseline, 1e-12)


def check_one(change, row, balance):
    """Check the gain of one change against the plan's, which may have a better balance."""
    saved, best = row
    assert change.gain <= saved + 1e-9
    if best == balance:
        assert change.gain == pytest.approx(saved)


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
