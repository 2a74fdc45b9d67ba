"""Layers of runs whose schedule splits the backward: their times are the whole, whichever part has spans of layers."""

from __future__ import annotations

import numpy as np
import pytest

from pipesight.analysis.analyse import analyse
from pipesight.plan import Setting, best_plans, measure, predict, settings, simulate, zero_bubble
from pipesight.runs.reading.run import open_run
from pipesight.schedule.task_orders import KINDS
from support.synthetic import Made

N, CHUNKS, STEPS = 3, 6, 5
FORWARD = [40, 80, 60, 50, 30, 90]
INPUTS = [0, 0, 80, 40, 20, 100]
"""The gradients of inputs; the first partition has none."""
WEIGHTS = [90, 150, 40, 20, 10, 50]
"""Those of weights: half of those of inputs; in the first partition, all of the backward."""
BACKWARD = [a + b for a, b in zip(INPUTS, WEIGHTS, strict=True)]
WHOLE = [both / 1.04 if inputs else both for both, inputs in zip(BACKWARD, INPUTS, strict=True)]
"""What they would take if they were not split, which costs 4%."""
PHASES = {"F": ("forward", FORWARD), "B": ("backward", INPUTS), "W": ("weight", WEIGHTS)}


def named(times, j):
    return {f"l{k}": times[k] for k in (2 * j, 2 * j + 1)}


@pytest.fixture(params=["backwards", "no backwards"])
def run(request, tmp_path):
    """Make a run as `DistributedPipeline` writes them: weights have layers in the first partition alone."""
    schedule = zero_bubble(N, CHUNKS)
    lengths = np.zeros((4, N, 1))
    for kind, (_, times) in PHASES.items():
        lengths[KINDS.index(kind), :, 0] = np.reshape(times, (N, 2)).sum(axis=1)
    lengths[KINDS.index("B"), 0] = 1  # near nothing
    found = simulate(schedule, lengths)
    made = Made(tmp_path / "run", balance=[2] * N, chunks=CHUNKS)
    made.pipeline = {"schedule": "interleaved-zero-bubble", "ranks": [[rank] for rank in range(N)]}
    at = 0
    for step in range(STEPS):
        for kind, j, i in schedule.order[schedule.order[..., 0] >= 0].tolist():
            phase, times = PHASES[KINDS[kind]]
            begin = at + int(found.begin[kind, j, i])
            where = {"partition": j, "microbatch": i, "rank": j, "begin": begin, "dur": int(lengths[kind, j, 0])}
            spanned = phase == "forward" or (phase == "weight") == (j == 0)
            if request.param == "no backwards" and j == 1 and phase == "backward":
                spanned = False
            made.task(step, phase=phase, layers=named(times, j) if spanned else None, **where)
        at += int(found.makespan) + 50
    made.write()
    return made.folder, request.param


@pytest.mark.slow
def test_costs_are_the_whole_backward(run):
    """Layers cost what they do in both parts, and the recorded setting is simulated to take what it took."""
    folder, spans = run
    with open_run(folder) as opened:
        found = measure(opened)
    costs = found.costs
    forward = [layer.forward + CHUNKS * layer.forward_each for layer in costs.layers]
    backward = [layer.backward + CHUNKS * layer.backward_each for layer in costs.layers]
    assert forward == pytest.approx([CHUNKS * t * 1e-6 for t in FORWARD])
    assert found.predicted_seconds == pytest.approx(found.step_seconds, rel=0.01)
    assert found.setting == (None if spans == "no backwards" else Setting("zero-bubble", N, CHUNKS, "never"))
    if spans == "no backwards":  # weights by the forwards: 60 as 60 to 50
        shared = [60 * 60 / 110, 60 * 50 / 110]
        assert backward[2:4] == pytest.approx([CHUNKS * t * 1e-6 for t in shared], rel=1e-3)
        return
    assert backward == pytest.approx([CHUNKS * t * 1e-6 for t in WHOLE])
    assert costs.weight_share == pytest.approx(1 / 3)
    assert predict(costs, found.setting, found.balance).step_seconds == found.predicted_seconds
    modes, names = ["never"], ["gpipe", "1f1b", "zero-bubble"]
    possible = settings(costs, partitions=N, schedules=names, checkpoints=modes, chunks=[CHUNKS], rounds=1)
    plans = best_plans(costs, list(possible))
    assert plans[0].step_seconds <= found.predicted_seconds * 1.01
    tasks = [sum(sum(named(times, j).values()) for times in (FORWARD, BACKWARD)) for j in range(N)]
    for plan in plans:  # no less than the work there is, no more than one after the other
        assert sum(tasks) * CHUNKS / N * 1e-6 < plan.step_seconds < sum(tasks) * CHUNKS * 1e-6


@pytest.mark.slow
def test_report_has_the_whole_backward(run):
    """The table of layers has the same, of all steps and of some."""
    folder, spans = run
    with open_run(folder) as opened:
        reports = [analyse(opened), analyse(opened, steps=range(2, 4))]
    for report in reports:
        assert [layer.name for layer in report.layers] == [f"l{k}" for k in range(2 * N)]
        known = [0, 1, 4, 5] if spans == "no backwards" else range(2 * N)
        backwards = [layer.backward for layer in report.layers]
        assert [backwards[k] for k in known] == pytest.approx([BACKWARD[k] for k in known])
        if spans == "no backwards":
            assert backwards[2:4] == pytest.approx([60 * 60 / 110, 60 * 50 / 110], rel=1e-2)
        assert sum(layer.share for layer in report.layers) == pytest.approx(1)
    assert {layer.runs[2] for layer in reports[1].layers} == {2 * CHUNKS}
