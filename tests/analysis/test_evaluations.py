"""Evaluations: they may be of any size, and times of layers and plans are those of training alone."""

from __future__ import annotations

import pytest
import torch

from pipesight.analysis.analyse import analyse
from pipesight.recording import observe
from pipesight.runs.reading.event_codes import FORWARD
from pipesight.runs.reading.run import open_run
from support.analysed import analysed
from support.observed import learn, pipeline, sgd
from support.synthetic import Made

LAYERS = {0: ["l0", "l1"], 1: ["l2", "l3", "l4", "l5"]}


def evaluated(folder, *, evaluations, frozen=False, ranks=False, steps=7):
    """Make a run of two partitions, in one process or of a rank each.

    Its evaluations, one before every second step, take ten times as long. Rank 1 counts mini-batches from 100.
    """
    run = Made(folder, balance=[2, 4], chunks=4)
    if ranks:
        run.pipeline = {"ranks": [0, 1]}
    at = 0
    for step in range(steps):
        if evaluations and step and step % 2 == 0:
            for i in range(4):
                for j in range(2):
                    add(run, step, 50 + step, i, j, "forward", at + 1000 * (i + j), 1000, ranks=ranks)
            at += 5100
        for i in range(4):
            for j in range(2):
                add(run, step, step + 1, i, j, "forward", at + 100 * (i + j), 100, ranks=ranks)
                if j or not frozen:
                    begin = at + 500 + 200 * (3 - i) + 200 * (1 - j)
                    add(run, step, step + 1, i, j, "backward", begin, 200, ranks=ranks)
        at += 1600
    return run


def add(run, step, minibatch, i, j, phase, begin, dur, *, ranks):
    rank = j if ranks else 0
    layers = {name: dur // len(LAYERS[j]) for name in LAYERS[j]}
    where = {"minibatch": minibatch + 100 * rank, "partition": j, "microbatch": i, "rank": rank}
    run.task(step, **where, phase=phase, begin=begin, dur=dur, layers=layers)


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_are_those_of_training(tmp_path, ranks, frozen):
    """Evaluations change neither the table of layers nor what plans are made of, even if a rank has no backward."""
    plain = analysed(evaluated(tmp_path / "plain", evaluations=False, ranks=ranks, frozen=frozen))
    report = analysed(evaluated(tmp_path / "run", evaluations=True, ranks=ranks, frozen=frozen))
    assert (plain.evaluations, report.evaluations) == (0, 3)
    assert report.layers == plain.layers
    assert [layer.forward for layer in report.layers] == [50, 50, 25, 25, 25, 25]
    assert [layer.longest for layer in report.layers] == [50 if frozen else 100] * 2 + [50] * 4
    assert report.measured.costs.layers == plain.measured.costs.layers
    assert report.measured.predicted_seconds - report.measured.costs.outside == pytest.approx(
        plain.measured.predicted_seconds - plain.measured.costs.outside
    )


def test_recorded_evaluations_are_kept_apart(tmp_path):
    """Of a recorded run, each layer has as many runs as the counted steps have micro-batches."""
    model = pipeline(chunks=4)
    optimizer = sgd(model)
    with observe(tmp_path / "run"):
        for _ in range(6):
            learn(model)
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(80, 4))
    with open_run(tmp_path / "run") as run:
        report, everything = analyse(run), run.layer_times()
    assert everything.count[everything.phase == FORWARD].tolist() == [12 * 4] * len(report.layers)
    assert report.evaluations == 6
    often = 4 * int(report.counted.sum())
    assert [layer.runs[::2] for layer in report.layers] == [(often, often)] * len(report.layers)


def test_layers_of_some_steps_are_those_of_training(tmp_path):
    """The same holds for steps that were asked for, and for a mini-batch without backward that lacks tasks."""
    run = evaluated(tmp_path / "run", evaluations=True)
    add(run, 3, 80, 0, 0, "forward", 100_000, 1000, ranks=False)
    report = analysed(run, steps=range(2, 4))
    assert [layer.forward for layer in report.layers] == [50, 50, 25, 25, 25, 25]
    assert {layer.runs for layer in report.layers} == {(8, 0, 8)}


def test_layers_of_evaluations_alone(tmp_path):
    """Where nothing is trained, layers have the times of evaluations."""
    run = Made(tmp_path / "run", balance=[2, 4], chunks=1)
    for step in range(3):
        for j in range(2):
            add(run, step, step, 0, j, "forward", 5000 * step + 1000 * j, 1000, ranks=False)
    assert [layer.forward for layer in analysed(run).layers] == [500, 500, 250, 250, 250, 250]


def test_transfers_of_evaluations_are_no_link(tmp_path):
    """The link of plans is as fast as in training, however large the tensors of evaluations are."""

    def link(evaluations):
        run = evaluated(tmp_path / str(evaluations), evaluations=evaluations)
        for step in range(7):
            run.transfer(step, partition=1, microbatch=0, begin=1600 * step, dur=20)
        if evaluations:
            where = {"step": 2, "minibatch": 52, "partition": 1, "microbatch": 0}
            run.event("device", "transfer", begin=4000, dur=900, tid=4101, **where, size=10**6)
        return analysed(run).measured.costs.link

    assert link(True) == link(False)
    assert link(False).latency == pytest.approx(20e-6)


@pytest.mark.parametrize("off", [False, True])
def test_gains_of_a_wrong_simulation_are_in_doubt(tmp_path, off):
    """A remark says so where the recorded settings, simulated, take far more time than they took."""
    run = Made(tmp_path / "run", balance=[3, 1], chunks=4)
    times = {0: 300, 1: 100}
    for step in range(4):
        run.gpipe(
            step,
            lambda phase, i, j: times[j],
            at=step * 5000,
            layers=lambda j: [f"l{3 * j + k}" for k in range(3 - 2 * j)],
        )
    if off:  # layers that claim to take twice as long as their tasks
        for event in run.events[0]:
            event["dur"] *= 2 if "layer" in event["args"] else 1
    report = analysed(run)
    assert any(change.promise == "simulated" for change in report.verdict.changes)
    assert any("simulated gains may be off" in remark.text for remark in report.remarks) == off
