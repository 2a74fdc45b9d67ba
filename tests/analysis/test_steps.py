"""Steps: what belongs to them, how long they took, which of them count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse
from pipesight.analysis.latest_step import steps_of
from pipesight.runs.reading.run import open_run
from support.analysed import add_up, analysed, even, parts
from support.synthetic import START, Made


def test_period_is_what_lies_between_steps(made):
    """A step lasts from its first forward to that of the next; what the main thread does then has its name."""
    at = 0
    for step in range(3):
        at = made.gpipe(step, even, at=at)
        made.span("compute", "step", begin=at + 5, dur=50)
        made.span("checkpoint", "capture", begin=at + 60, dur=20)
        made.span("comm", "all_reduce", begin=at + 80, dur=10)
        made.span("dataloader", "fetch", begin=at + 90, dur=100)
        at += 200
    report = analysed(made)
    add_up(report)
    assert report.steps.period.tolist() == [1100, 1100, 1090]  # the last ends with its last span
    outside = {"data_loading": 100, "optimizer": 50, "checkpoints": 20, "communication": 10}
    mean = {"computing": 600, "fill_and_drain": 300, **outside, "between_steps": (20 + 20 + 10) / 3}
    assert parts(report) == pytest.approx(mean)


def test_moments_count_once(made):
    """Communication inside of the optimizer's step is communication; the rest of that step is the optimizer."""
    end = made.gpipe(0, even)
    made.span("compute", "step", begin=end, dur=100)
    made.span("comm", "all_reduce", begin=end + 20, dur=30)
    made.gpipe(1, even, at=end + 100)
    report = analysed(made, steps=range(1))
    assert parts(report) == {"computing": 600, "fill_and_drain": 300, "optimizer": 70, "communication": 30}


def test_accumulated_minibatches_are_one_step(tmp_path):
    """Mini-batches that carry one step's number are one step, and each has a window."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    at = 0
    for minibatch in range(6):
        before = len(made.events.get(0, []))
        at = made.gpipe(minibatch // 3, even, at=at) + 10
        for event in made.events[0][before:]:
            event["args"]["minibatch"] = minibatch + 1
    report = analysed(made)
    add_up(report)
    assert report.steps.minibatches.tolist() == [3, 3]
    assert report.steps.period.tolist() == [3 * 910, 3 * 910 - 10]
    assert report.pipelines[0].minibatches == 6
    assert report.overall is not None
    per_second = 1e6 / np.median([2730, 2720])
    assert report.overall.microbatches_per_second == pytest.approx(6 * per_second)
    assert report.overall.samples_per_second == pytest.approx(3 * 16 * per_second)


def test_samples_that_were_not_recorded(made):
    """Without the samples of each mini-batch, there is a remark instead of a number."""
    made.samples = None
    for step in range(3):
        made.gpipe(step, even, at=1000 * step)
    report = analysed(made)
    assert report.overall is not None
    assert report.overall.samples_per_second is None
    assert [step.samples_per_second for step in steps_of(report)] == [None] * 3
    assert [r.text for r in report.remarks] == [
        "samples/s are not known: the trace does not say how many samples each mini-batch has, only that the first "
        "call of the pipeline had 16; to know them, record the run again"
    ]


def test_samples_of_tasks_timed_on_gpus(made):
    """The samples are on the tasks of the host; those on a GPU's track are of the same mini-batch."""
    for step, made.samples in enumerate((16, 16, 5)):
        made.gpipe(step, even, at=1000 * step)
    for event in list(made.events[0]):
        where = {name: event["args"][name] for name in ("step", "minibatch", "partition", "microbatch")}
        made.event(
            "compute",
            event["name"],
            begin=event["ts"] - START + 5,
            dur=event["dur"],
            tid=10_000_000,
            **where,
            device="cuda:0",
        )
    assert analysed(made).steps.samples.tolist() == [16, 16, 5]


def test_evaluations_are_no_steps(made):
    """A mini-batch without backward is no step; its time is evaluation, in the step before it."""
    end = made.gpipe(0, even)
    for j, i in ((j, i) for j in range(2) for i in range(2)):
        made.task(1, minibatch=50, partition=j, microbatch=i, phase="forward", begin=end + 100 * (i + j), dur=100)
    made.gpipe(1, even, at=end + 350)
    report = analysed(made)
    add_up(report)
    assert report.evaluations == 1
    assert report.steps.step.tolist() == [0, 1]
    names = [*report.overall.parts]
    assert report.steps.parts[names.index("evaluation")].tolist() == [300, 0]
    assert report.steps.parts[names.index("between_steps")].tolist() == [50, 0]


def test_run_of_evaluations_has_a_bubble(made):
    """Where nothing is trained, mini-batches are steps: forwards have a bubble too."""
    for step in range(3):
        for j, i in ((j, i) for j in range(2) for i in range(2)):
            made.task(step, partition=j, microbatch=i, phase="forward", begin=step * 400 + 100 * (i + j), dur=100)
    report = analysed(made)
    add_up(report)
    assert report.overall.bubble == pytest.approx(1 / 3)
    assert report.evaluations == 0


def test_killed_run_is_told_up_to_its_last_step(made):
    """A last mini-batch of which tasks are missing is left out, and said to be; the step before keeps its period."""
    at = 0
    for step in range(3):
        at = made.gpipe(step, even, at=at) + 30
    made.events[0] = [e for e in made.events[0] if e["ts"] + e["dur"] <= max(e["ts"] for e in made.events[0])]
    report = analysed(made)
    add_up(report)
    assert report.steps.step.tolist() == [0, 1]
    assert report.steps.period.tolist() == [930, 930]
    assert report.left.incomplete == 1
    assert any("incomplete" in remark.text for remark in report.remarks)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], None),
        ([1, 3], "statistics were measured in 2 of 4 steps; their times include it (median step: 960 µs with, 930 µs"),
        ([3], "statistics were measured in 1 of 4 steps; its time includes it (median step: "),
        (range(9), "statistics were measured in 4 of 4 steps; their times include it"),
    ],
)
def test_steps_with_statistics_are_named(made, steps, text):
    """The report says which steps measured statistics, as they take longer for it; a scalar measures nothing."""
    at = 0
    for step in range(4):
        at = made.gpipe(step, even, at=at) + (120 if step == 1 else 30)
        made.stat("loss", "", "", step, 0.5)
    for step in steps:
        made.stat('a"\\', "activation", "mean", step, 0.0)
    found = [remark.text for remark in analysed(made).remarks if "statistics" in remark.text]
    assert [line[: len(text or "")] for line in found] == [text] * bool(text)


@pytest.mark.slow
@given(cut=st.integers(1, 16))
@settings(deadline=None, max_examples=16)
def test_cut_anywhere(tmp_path_factory, cut):
    """Wherever a run is cut off, whole steps before that are told exactly."""
    made = Made(tmp_path_factory.mktemp("cut") / "run", balance=[1, 1], chunks=2)
    made.gpipe(2, even, at=made.gpipe(1, even, at=made.gpipe(0, even)))
    made.events[0] = sorted(made.events[0], key=lambda event: event["ts"] + event["dur"])[: -cut or None]
    with open_run(made.write(end=False)) as run:
        report = analyse(run)
    add_up(report)
    whole = (24 - cut) // 8
    assert report.steps.step.tolist() == list(range(whole))
    assert report.steps.window.tolist() == [900] * whole


def test_sampled_steps_end_with_their_optimizer(made):
    """Where the step after was not recorded, a step ends with its optimizer, not with the next one recorded."""
    for step in (0, 10, 20):
        end = made.gpipe(step, even, at=step * 10_000)
        made.span("compute", "step", begin=end + 10, dur=40)
    assert analysed(made).steps.period.tolist() == [950, 950, 950]


def test_warm_up_is_left_out(made):
    """First steps that take much longer are no part of the overall numbers, and are named."""
    at = 0
    for step in range(10):
        at = made.gpipe(step, lambda *task, k=5 if step < 2 else 1: even(*task) * k, at=at)
    report = analysed(made)
    assert report.left.warm_up == (0, 1)
    assert report.overall.steps == 8
    assert report.overall.time.most == 900
    assert len(report.steps) == 10


def test_a_slow_beginning_is_no_warm_up(made):
    """Of a run whose first 139 steps of 2,000 are slow, a few at most are warm-up, and all others count."""
    at = 0
    for step in range(400):
        slow = 30 if step == 0 else 5 if step < 139 else 1
        at = made.gpipe(step, lambda *task, k=slow: even(*task) * k, at=at)
    report = analysed(made)
    assert report.left.warm_up == (0,)
    assert report.overall.steps == 399
    assert report.overall.time.most == 5 * 900


def test_throughput_counts_pauses(made):
    """Samples are divided by all the time that went by, also where one step in ten is followed by a long pause."""
    at = 0
    for step in range(20):
        at = made.gpipe(step, even, at=at) + (9000 if step % 10 == 5 else 0)
    overall = analysed(made).overall
    assert overall.time.median == 900
    assert overall.elapsed == 20 * 900 + 2 * 9000
    assert overall.steps_per_second == pytest.approx(20 / 36e-3)
    assert overall.samples_per_second == pytest.approx(20 * 16 / 36e-3)
    assert overall.microbatches_per_second == pytest.approx(20 * 2 / 36e-3)


def test_steps_that_are_not_the_first_are_no_warm_up(made):
    """Where the first steps are not asked for, none is warm-up, however slow."""
    at = 0
    for step in range(12):
        at = made.gpipe(step, lambda *task, k=5 if step < 4 else 1: even(*task) * k, at=at)
    assert analysed(made, steps=range(3, 12)).left.warm_up == ()
    assert analysed(made).left.warm_up == (0, 1, 2)


def test_optimizer_of_a_gpu(made):
    """On a GPU, the optimizer takes the time that it takes there, while the host is ahead."""
    for step in range(2):
        at = step * 1000
        for k, (phase, j) in enumerate([("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]):
            made.task(step, partition=j, microbatch=0, phase=phase, begin=at + 200 * k, dur=200, device=f"cuda:{j}")
        made.span("compute", "step", begin=at + 50, dur=10)
        made.event("compute", "step", begin=at + 850, dur=100, tid=10_000_000, device="cuda:0")
    report = analysed(made)
    add_up(report)
    assert report.overall.parts["optimizer"] == 100
    assert report.steps.period.tolist() == [1000, 950]


def test_slow_step_later_is_no_warm_up(made):
    """A slow step in the middle counts."""
    at = 0
    for step in range(10):
        at = made.gpipe(step, lambda *task, k=5 if step == 4 else 1: even(*task) * k, at=at)
    report = analysed(made)
    assert report.left.warm_up == ()
    assert report.overall.time.most == 4500


def test_the_step_that_makes_the_overall_bubble_is_named(made):
    """One long step with a large bubble weighs more than all others together: the report names it, and only then."""
    at = 0
    for step in range(20):
        slow = 200 if step == 12 else 1
        at = made.gpipe(step, lambda phase, i, j, k=slow: even(phase, i, j) * (k if j == 1 else 1), at=at)
    report = analysed(made)
    assert report.overall.bubble > report.overall.bubbles.high
    (remark,) = [remark.text for remark in report.remarks if "overall bubble" in remark.text]
    assert "because of step 12," in remark
    bubble = report.steps.bubble[report.steps.step == 12].item()
    assert f"{report.overall.bubble:.1%}" in remark
    assert f"{bubble:.1%}" in remark
    others = analysed(made, steps=range(12))
    assert not [remark for remark in others.remarks if "overall bubble" in remark.text]


def test_steps_narrow(made):
    """With ``steps``, only these are told; the last keeps its period, as the one after it is known."""
    at = 0
    for step in range(6):
        at = made.gpipe(step, even, at=at) + 100
    report = analysed(made, steps=range(2, 4))
    assert report.steps.step.tolist() == [2, 3]
    assert report.steps.period.tolist() == [1000, 1000]
    with pytest.raises(ValueError, match="none of these steps was recorded"):
        analysed(made, steps=range(10, 20))
