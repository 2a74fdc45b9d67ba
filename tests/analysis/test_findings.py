"""What a run comes to: steps, throughput, losses outside of the pipeline, layers, stragglers, what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse, measure
from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.comparison import compare
from pipesight.analysis.described_pipelines import pipelines_of
from pipesight.analysis.nonfinite import first_nonfinite
from pipesight.analysis.planned_changes import AT_LEAST, AT_MOST, SIMULATED, Change
from pipesight.analysis.report import Report
from pipesight.analysis.stragglers import PartitionTimes, find_stragglers
from pipesight.plan import settings as planned_settings
from pipesight.plan.plans import best_plans
from pipesight.runs.reading.run import open_run
from pipesight.schedule.task_orders import interleaved
from pipesight.view.text_report import render
from support import warm
from support.synthetic import Made

EVEN = {"forward": 100, "recompute": 100, "backward": 200}


def even(phase: str, i: int, j: int) -> int:
    return EVEN[phase]


def analysed(made: Made, **options) -> Report:
    with open_run(made.write()) as run:
        return analyse(run, **options)


def parts(report: Report) -> dict[str, float]:
    """Return the parts of the mean step that there are."""
    assert report.overall is not None
    return {name: time for name, time in report.overall.parts.items() if time}


def add_up(report: Report) -> None:
    """Check that everything that should add up does."""
    assert report.steps.parts.sum(axis=0) == pytest.approx(report.steps.period, rel=1e-9)
    assert (report.steps.parts >= 0).all()
    if report.overall is not None:
        assert sum(report.overall.parts.values()) == pytest.approx(report.overall.time.mean)
    for pipeline in report.pipelines:
        for row in pipeline.rows:
            assert row.busy + sum(row.losses.values()) == pytest.approx(pipeline.window.mean)
            assert row.bubble == pytest.approx(1 - row.busy / pipeline.window.mean)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "run", balance=[1, 1], chunks=2)  # a window of 900, of which 600 are busy


# Steps.


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


# Pipelines.


def test_several_pipelines(made):
    """Pipelines of different size in one process are told apart."""
    at = 0
    for step in range(2):
        at = made.gpipe(step, even, at=at)
        for k, (phase, j) in enumerate([("forward", 0), ("forward", 1), ("forward", 2), ("backward", 2)]):
            made.task(step, minibatch=90 + step, partition=j, microbatch=0, phase=phase, begin=at + 10 * k, dur=10)
        for k, j in enumerate([1, 0]):
            begin = at + 40 + 10 * k
            made.task(step, minibatch=90 + step, partition=j, microbatch=0, phase="backward", begin=begin, dur=10)
        at += 60
    made.description["pipelines"] = [{"partitions": 2, "chunks": 2}, {"partitions": 3, "chunks": 1}]
    report = analysed(made)
    add_up(report)
    assert [pipeline.partitions for pipeline in report.pipelines] == [2, 3]
    assert [pipeline.bubble for pipeline in report.pipelines] == pytest.approx([1 / 3, 2 / 3])
    assert report.steps.period.tolist() == [960, 960]


def test_pipelines_at_the_same_time_share_it(made):
    """Where windows overlap, the parts of a step still add up to its period."""
    for step in range(2):
        for minibatch in (0, 1):
            before = len(made.events.get(0, []))
            made.gpipe(step, even, at=step * 2000 + minibatch * 300)
            for event in made.events[0][before:]:
                event["args"]["minibatch"] = 10 * step + minibatch
    report = analysed(made)
    add_up(report)
    assert report.steps.window.tolist() == [1200, 1200]


def test_ranks_that_have_the_same_partitions_are_replicas(tmp_path):
    """Data-parallel replicas are told separately, and put together."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    for rank in range(3):
        at = 0
        for step in range(4):
            slow = 2 if rank == 2 else 1
            at = made.gpipe(step, lambda *task, slow=slow: even(*task) * slow, at=at, rank=rank)
    report = analysed(made)
    add_up(report)
    assert report.ranks == (0, 1, 2)
    assert len(report.steps) == 12
    assert report.pipelines[0].replicas == 3
    assert {s.rank for s in report.stragglers} == {2}
    assert [s.slower for s in report.stragglers] == pytest.approx([2, 2])


def test_ranks_with_partitions_of_their_own_are_one_pipeline(tmp_path):
    """In a distributed run, the tasks of all ranks make up a step, although mini-batches have other numbers."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    at = 0
    for step in range(3):
        at = made.gpipe(step, even, at=at) + 10
    events = made.events.pop(0)
    for rank in range(2):
        made.events[rank] = [e for e in events if e["args"]["partition"] == rank]
        for event in made.events[rank]:
            event["pid"] = event["tid"] = 4000 + rank
            event["args"] = {**event["args"], "minibatch": event["args"]["step"] * (rank + 1) + 7}
    report = analysed(made)
    add_up(report)
    assert report.steps.step.tolist() == [0, 1, 2]
    assert report.overall.bubble == pytest.approx(1 / 3)
    assert [row.ranks for row in report.pipelines[0].rows] == [(0,), (1,)]


def interleaved_run(folder: Path, partitions: int, *, processors: int = 2, ranks: int = 2) -> Made:
    """Make a run of the same model cut into some partitions, on two ranks: 4 ms forward and 8 backward, in all."""
    made = Made(folder, balance=[1] * partitions, chunks=8, processors=processors)
    schedule = interleaved(partitions, 8, devices=ranks)
    made.pipeline = {"schedule": schedule.name, "ranks": [[j % ranks] for j in range(partitions)]}
    at = 0
    for step in range(3):
        times = {"forward": 4000 // partitions, "backward": 8000 // partitions}
        at = made.scheduled(step, schedule, times, at=at)
    return made


def test_bubble_of_ranks_with_several_partitions(tmp_path):
    """A rank that has several partitions counts once: the bubble is that of the schedule, and the plan's."""
    made = interleaved_run(tmp_path / "run", 4)
    report = analysed(made)
    add_up(report)
    (pipeline,) = report.pipelines
    assert (pipeline.partitions, pipeline.workers, pipeline.on_processors) == (4, 2, 2)
    # (p - 1) / (v m + p - 1), with v partitions on each of p ranks.
    found = [report.overall.bubble, pipeline.bubble, report.overall.bound, pipeline.bound]
    assert found == pytest.approx([1 / 17] * 4)
    assert parts(report) == pytest.approx({"computing": 2 * 8 * 3000, "fill_and_drain": 3000})
    assert all(row.losses["sharing"] > 0 for row in pipeline.rows)
    with open_run(made.folder) as run:
        assert measure(run).bubble == pytest.approx(report.overall.bubble)


def test_several_partitions_a_rank_are_no_fault(tmp_path):
    """The verdict counts ranks, not partitions, against processors, and does not advise against what is on purpose."""
    verdict = analysed(interleaved_run(tmp_path / "enough", 4)).verdict
    assert "with 4 partitions on 2 ranks and 8 micro-batches" in verdict.text
    for word in ("processor", "share", "sharing"):
        assert word not in verdict.text
    assert not [change for change in verdict.changes if "its own device" in change.what]
    shown = render(analysed(interleaved_run(tmp_path / "shown", 4)))
    assert "4 partitions on 2 ranks, 8 micro-batches" in shown
    assert "right: bubble of the rank" in shown
    assert "Partitions on one rank take turns" in shown
    verdict = analysed(interleaved_run(tmp_path / "few", 4, processors=1)).verdict
    assert "2 ranks share 1 processor and slow each other down." in verdict.text


def test_one_rank_with_all_partitions(tmp_path):
    """A pipeline for several ranks that is on one is never idle, unless that rank is."""
    report = analysed(interleaved_run(tmp_path / "run", 4, ranks=1))
    add_up(report)
    assert report.pipelines[0].workers == 1
    assert report.verdict.text.startswith("There is one rank, so there is no bubble; it is idle 0.0% of the time.")
    assert parts(report) == pytest.approx({"computing": 8 * 12_000})


def test_comparing_with_more_partitions_a_rank(tmp_path):
    """Cut into more partitions on as many ranks, a model takes as long to compute; what changes is the bubble."""
    first, second = (analysed(interleaved_run(tmp_path / str(n), n)) for n in (2, 4))
    found = compare(first, second)
    assert found.parts["computing"].change == pytest.approx(0)
    assert found.parts["fill_and_drain"].change == pytest.approx(-3000)
    assert found.quantities["bubble"].change == pytest.approx(1 / 17 - 1 / 9)
    assert "In the mean step, most of that is fill and drain (-3.00 ms)." in found.text


def test_partitions_of_a_rank_that_compute_at_once(tmp_path):
    """Where tasks of one rank overlap, in threads of their own, its partitions do not take turns: each counts."""
    made = Made(tmp_path / "run", balance=[1] * 4, chunks=2)
    made.gpipe(0, even)
    events = made.events.pop(0)
    made.events = {rank: [e for e in events if e["args"]["partition"] // 2 == rank] for rank in range(2)}
    report = analysed(made)
    add_up(report)
    assert report.pipelines[0].workers == 4
    assert report.overall.bubble == pytest.approx(3 / 5)


def test_partitions_on_one_gpu_share_it(tmp_path):
    """The description says which partitions share a device, and that has its loss."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=1)
    for k, (phase, j) in enumerate([("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]):
        made.task(0, partition=j, microbatch=0, phase=phase, begin=100 * k, dur=100, device="cuda:0")
    made.description["pipelines"] = [{"partitions": 2, "chunks": 1, "devices": ["cuda:0", "cuda:0"]}]
    report = analysed(made)
    add_up(report)
    assert [row.device for row in report.pipelines[0].rows] == ["cuda:0", "cuda:0"]
    assert parts(report) == {"computing": 200, "fill_and_drain": 200}  # one micro-batch could not run beside another
    assert (report.pipelines[0].devices, report.pipelines[0].device_idle) == (1, 0)
    assert "The partitions share one device, which computes 100% of the window." in report.verdict.text


# Layers.


def test_layers_in_the_order_of_the_model(tmp_path):
    """Layers come with their mean times of a micro-batch, partition and share."""
    made = Made(tmp_path / "run", balance=[2, 1], chunks=2)
    names = [["l0", "l1"], ["l2"]]
    made.gpipe(0, even, checkpointed=1, layers=lambda j: names[j])
    layers = analysed(made).layers
    assert [(layer.name, layer.partition, layer.type) for layer in layers] == [
        ("l0", 0, "Linear"),
        ("l1", 0, "Linear"),
        ("l2", 1, "Linear"),
    ]
    assert [(layer.forward, layer.recompute, layer.backward) for layer in layers] == [(50, 50, 100)] * 2 + [
        (100, 100, 200)
    ]
    assert [layer.runs for layer in layers] == [(2, 1, 2)] * 3
    assert sum(layer.share for layer in layers) == pytest.approx(1)


def test_partition_and_layer_narrow(tmp_path):
    """With ``partition`` and ``layer``, only these are told; what is not there is an error that names what is."""
    made = Made(tmp_path / "run", balance=[2, 1], chunks=2)
    names = [["l0", "l1"], ["l2"]]
    made.gpipe(0, even, layers=lambda j: names[j])
    report = analysed(made, partition=0)
    assert [row.partition for row in report.pipelines[0].rows] == [0]
    assert [layer.name for layer in report.layers] == ["l0", "l1"]
    assert [layer.name for layer in analysed(made, layer="l*").layers] == ["l0", "l1", "l2"]
    assert [layer.name for layer in analysed(made, layer="l2").layers] == ["l2"]
    with pytest.raises(ValueError, match=r"no layer is named 'x' \(layers: l0, l1, l2\)"):
        analysed(made, layer="x")
    with pytest.raises(ValueError, match=r"no partition 2 \(partitions: 0 to 1\)"):
        analysed(made, partition=2)


# Stragglers.


def lane(rank: int, partition: int, *busy: float) -> PartitionTimes:
    return PartitionTimes(rank, partition, np.arange(len(busy)), np.array(busy, float))


def test_bursts_are_found():
    """A lane that takes much longer than it usually does, alone, has a burst; if all do, none has."""
    steady = lane(0, 0, *[1000] * 8, 5000, 1000)
    bursty = lane(0, 1, *[1000] * 4, 4000, *[1000] * 3, 5000, 1000)
    (found,) = find_stragglers([steady, bursty])
    assert (found.partition, found.slower, found.bursts, found.burst) == (1, None, (4,), 4)


def test_a_partition_with_more_work_is_no_straggler():
    """Partitions are not compared with each other: that is imbalance. The same partition on other ranks is."""
    assert find_stragglers([lane(0, 0, *[1000] * 5), lane(0, 1, *[3000] * 5)]) == []
    busy = {(r, j): 1000 + 2000 * j for r in range(3) for j in range(2)} | {(2, 1): 6000}
    (found,) = find_stragglers([lane(r, j, *[time] * 5) for (r, j), time in busy.items()])
    assert (found.rank, found.partition, found.slower) == (2, 1, 2)


def test_even_lanes_are_no_stragglers():
    """Lanes that differ by less than a tenth are all right."""
    assert find_stragglers([lane(r, j, *[1000 + 20 * r] * 5) for r in range(3) for j in range(2)]) == []


# What is not finite.


def line(iteration: int, layer: str, tensor: str, **more) -> dict:
    return {"iteration": iteration, "layer": layer, "tensor": tensor, "statistic": "mean", "value": None, **more}


@pytest.mark.parametrize(
    ("tensors", "first"),
    [
        ([("b", "activation"), ("a", "activation")], ("a", "activation")),
        ([("a", "gradient"), ("b", "gradient")], ("b", "gradient")),  # the backward comes to b first
        ([("b", "gradient"), ("b", "activation")], ("b", "activation")),
        ([("a", "wgrad"), ("a", "gradient")], ("a", "gradient")),
        ([("a", "wgrad"), ("b", "wgrad")], ("b", "wgrad")),
        ([("a", "activation"), ("b", "weight")], ("b", "weight")),  # weights are there before the forward
        ([("b", "activation"), ("b", "input")], ("b", "input")),
        ([("partitions.1.b.sub", "input"), ("partitions.0.a.sub", "activation")], ("partitions.0.a.sub", "activation")),
    ],
)
def test_first_nonfinite_in_the_order_of_the_step(tensors, first):
    """Of an iteration's bad tensors, the one is named that the step came to first."""
    lines = [line(7, "b", "input", nonfinite="nan", nans=1), line(2, "a", "activation")]
    lines += [line(3, layer, tensor, nonfinite="nan", nans=2) for layer, tensor in tensors]
    found = first_nonfinite(lines, layers=["a", "b"])
    assert (found.iteration, found.layer, found.tensor) == (3, *first)
    assert (found.nans, found.iterations) == (2, 2)


def test_all_finite():
    """Lines without a sign of NaN or Inf are fine, whatever else they hold."""
    assert first_nonfinite([line(1, "a", "input"), {}, {"nans": 0}, {"nonfinite": "nan"}]) is None


def test_undefined_statistics_are_finite_tensors():
    """The std of one element and the mean of none are NaN; the tensors are fine, but a scalar of the user's is not."""
    assert first_nonfinite([line(1, "a", "input", nonfinite="nan")]) is None
    assert first_nonfinite([line(1, "loss", "", nonfinite="nan")]).layer == "loss"


def placed(order: int, rank: int, layer: str, tensor: str, partition: int, microbatch: int, phase: str = "forward"):
    more = {"partition": partition, "microbatch": microbatch, "phase": phase, "order": order, "rank": rank}
    return line(3, layer, tensor, nans=1, **more)


def test_the_session_knows_the_order_of_computation():
    """Names say less than the session that measured: layers may run in any order."""
    lines = [placed(1, 0, "a", "activation", 0, 1), placed(0, 0, "b", "activation", 1, 0)]
    found = first_nonfinite(lines, layers=["a", "b"])
    assert (found.layer, found.where) == ("b", "iteration 3, partition 1, micro-batch 0, forward")


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        ([placed(0, 0, "a", "activation", 0, 5), placed(0, 1, "b", "activation", 1, 2)], 1),
        ([placed(0, 0, "a", "activation", 0, 2), placed(0, 1, "b", "activation", 1, 2)], 0),
        ([placed(0, 0, "a", "gradient", 0, 2, "backward"), placed(0, 1, "b", "gradient", 1, 2, "backward")], 1),
        ([placed(0, 0, "a", "gradient", 0, 2, "backward"), placed(0, 1, "b", "activation", 1, 2)], 1),
        ([placed(0, 0, "a", "activation", 0, 0), line(3, "b", "weight", nans=1, rank=1, order=0)], 1),
        ([placed(0, 0, "a", "gradient", 0, 0, "backward"), line(3, "b", "wgrad", nans=1, rank=1, order=0)], 1),
    ],
)
def test_first_nonfinite_of_ranks(lines, first):
    """Ranks are compared by the way of the data: micro-batch and partition forward, layers upwards backward."""
    assert first_nonfinite(lines, layers=["a", "b"]).rank == first
    assert first_nonfinite(lines[::-1], layers=["a", "b"]).rank == first


def test_nonfinite_of_a_run(made):
    """The report names the first tensor that is not finite."""
    made.gpipe(0, even)
    made.stat("l1", "activation", "mean", 4, 1.0)
    made.stats[0].append(line(5, "l1", "activation", nonfinite="inf", infs=3))
    found = analysed(made).nonfinite
    assert (found.iteration, found.layer, found.infs, found.rank) == (5, "l1", 3, 0)


# What to change.


def time_of(tmp_path: Path, name: str, balance: list[int], chunks: int, cost: Callable, **options) -> Report:
    """Analyse runs of 6 steps in which layer k takes ``cost(phase, k)`` for each sample of 16."""
    made = Made(tmp_path / name, balance=balance, chunks=chunks)
    names = [f"l{k}" for k in range(sum(balance))]
    ends = np.cumsum(balance)
    own = [list(range(end - size, end)) for size, end in zip(balance, ends, strict=True)]
    at = 0
    for step in range(6):
        at = _gpipe_of_layers(made, step, at, own, names, lambda phase, k: cost(phase, k) * 16 // chunks, **options)
    return analysed(made)


def _gpipe_of_layers(made, step, at, own, names, cost, checkpointed=0):
    times = {}

    def time(phase, i, j):
        times[phase, i, j] = {names[k]: cost(phase, k) for k in own[j]}
        return sum(times[phase, i, j].values())

    before = len(made.events.get(0, []))
    end = made.gpipe(step, time, at=at, checkpointed=checkpointed)
    for event in made.events[0][before:]:
        args = event["args"]
        phase = {"forward": "forward", "forward.recompute": "recompute", "backward": "backward"}[event["name"]]
        begin = event["ts"]
        for name, dur in times[phase, args["microbatch"], args["partition"]].items():
            layer = {**event, "name": f"{event['name']}.layer", "ts": begin, "dur": dur}
            made.events[0].append({**layer, "args": {**args, "layer": name}})
            begin += dur
    return end


def change(report: Report, word: str) -> Change:
    (found,) = [change for change in report.verdict.changes if change.what.startswith(word)]
    return found


def test_gain_of_a_balance_is_what_it_gives(tmp_path):
    """The balance that is proposed gains what is said: a run with it is that much faster."""
    cost = lambda phase, k: [30_000, *[10_000] * 5][k] * (2 if phase == "backward" else 1)
    before = time_of(tmp_path, "before", [3, 1, 2], 4, cost)
    found = change(before, "balance")
    assert found.what == "balance=[1, 2, 3] instead of [3, 1, 2]"
    assert found.promise == SIMULATED
    after = time_of(tmp_path, "after", [1, 2, 3], 4, cost)
    assert found.gain == pytest.approx(1 - after.overall.time.mean / before.overall.time.mean)
    assert not any(c.what.startswith("balance") for c in after.verdict.changes)


def test_gain_of_chunks_is_what_they_give(tmp_path):
    """More micro-batches gain what is said, if tasks take time in proportion to their samples."""
    cost = lambda phase, k: 160_000 if phase == "backward" else 80_000
    before = time_of(tmp_path, "before", [1, 1, 1, 1], 4, cost)
    found = change(before, "chunks")
    chunks = int(found.what.split("=")[1].split()[0])
    after = time_of(tmp_path, "after", [1, 1, 1, 1], chunks, cost)
    assert chunks > 4
    assert found.promise == AT_MOST
    assert found.gain == pytest.approx(1 - after.overall.time.mean / before.overall.time.mean, abs=0.005)


def test_chunks_are_the_best_of_all_that_are_planned(tmp_path):
    """Tiny tasks cost the same for any samples, so that one micro-batch is best: not just half or a quarter as many."""
    report = time_of(tmp_path, "run", [1, 1], 16, lambda phase, k: 40 if phase == "backward" else 20)
    found = change(report, "larger micro-batches")
    assert found.what == "larger micro-batches: chunks=1 instead of 16"
    assert found.why.startswith("the tasks are too small for splitting to pay: ")
    assert found.promise == AT_LEAST
    measured = report.measured
    possible = planned_settings(measured.costs, partitions=2, schedules=["gpipe"], checkpoints=["never"], recorded=16)
    best = best_plans(measured.costs, possible)[0]
    assert found.gain == pytest.approx(1 - best.step_seconds / measured.predicted_seconds)


def test_one_micro_batch_is_not_advised_to_save_recomputation(tmp_path):
    """With `except_last`, a single micro-batch is not recomputed: that is `checkpoint="never"`, not larger tasks."""
    cost = lambda phase, k: (200_000 if phase == "backward" else 100_000) // (1 + 9 * k)  # nearly all in partition 0
    report = time_of(tmp_path, "run", [1, 1], 4, cost, checkpointed=3)
    change(report, 'checkpoint="never"')
    found = [entry.what for entry in report.verdict.changes if "chunks=" in entry.what]
    assert all("chunks=1 " not in what for what in found), found


def test_gain_without_checkpoints_is_what_it_gives(tmp_path):
    """Without recomputation, a run is faster by what is said."""
    cost = lambda phase, k: 160 if phase == "backward" else 80
    before = time_of(tmp_path, "before", [1, 1], 8, cost, checkpointed=7)
    found = change(before, "checkpoint")
    assert found.what == 'checkpoint="never" instead of "except_last"'
    after = time_of(tmp_path, "after", [1, 1], 8, cost)
    assert found.gain == pytest.approx(1 - after.overall.time.mean / before.overall.time.mean)


def test_nothing_to_change(tmp_path):
    """Where nothing gains more than 1%, nothing is proposed, and the verdict says so."""
    made = Made(tmp_path / "run", balance=[1], chunks=1)
    made.gpipe(1, even, at=made.gpipe(0, even))
    report = analysed(made)
    assert report.verdict.changes == ()
    assert "no change" in report.verdict.text


@pytest.mark.parametrize(
    ("category", "name", "words"),
    [
        ("dataloader", "fetch", "num_workers"),
        ("compute", "step", "fused"),
        ("checkpoint", "capture", "checkpoints"),
        ("comm", "all_reduce", "communication"),
    ],
)
def test_time_between_steps_is_to_be_gained(made, category, name, words):
    """What the main thread spends half of a step with is named first, with what there is to gain at most."""
    at = 0
    for step in range(4):
        end = made.gpipe(step, even, at=at)
        made.span(category, name, begin=end, dur=900)
        at = end + 900
    first = analysed(made).verdict.changes[0]
    assert words in first.what
    assert first.promise == AT_MOST
    assert first.gain == pytest.approx(0.5)


def test_at_most_three(made):
    """There are at most three changes."""
    at = 0
    for step in range(4):
        at = made.gpipe(step, lambda phase, i, j: even(phase, i, j) + 10 * j, at=at, checkpointed=1)
        for category, name in (("dataloader", "fetch"), ("compute", "step"), ("checkpoint", "capture")):
            made.span(category, name, begin=at, dur=500)
            at += 500
    assert len(analysed(made).verdict.changes) == 3


# Whatever there is.


def test_trace_without_tasks(made):
    """A trace without a pipeline has no bubble; the report says why, and where the time went."""
    made.span("io", "read", begin=0, dur=300)
    made.span("io", "read", begin=400, dur=100)
    made.span("compute", "forward", begin=600, dur=50)
    report = analysed(made)
    assert report.overall is None
    assert "no pipeline tasks" in report.verdict.text
    assert [(name.category, name.name, name.count, name.total) for name in report.names] == [
        ("io", "read", 2, 400),
        ("compute", "forward", 1, 50),
    ]


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["partitions", "devices", "layers", "name", "partition", "balance"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["pipelines", "left_out", "outcome"]), anything))
def test_any_description_will_do(description):
    """Whatever a description says, what makes sense is taken, and nothing is raised."""
    for facts in pipelines_of(description):
        assert facts.partitions > 0
        assert facts.devices is None or len(facts.devices) == facts.partitions


def test_wrong_description_is_overruled_by_tasks(made):
    """Where the description cannot be, the tasks still tell of the bubble."""
    made.gpipe(0, even)
    made.description.update(pipelines=[{"partitions": "two"}, None], left_out=7, outcome={})
    assert analysed(made).overall.bubble == pytest.approx(1 / 3)


RECORD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import pipesight.trace
from pipesight import GPipe

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
pipe = GPipe(model, balance=[4, 2], devices=["cpu", "cpu"], chunks=4, checkpoint=sys.argv[2])
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=64)
with pipesight.trace.start(sys.argv[1]), pipesight.trace.instrument():
    for (x,) in loader:
        pipe(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        pipe.eval()(x)
"""


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_recorded_run_adds_up(tmp_path, checkpoint):
    """In a real run, busy + every loss = window, and the parts of a step = its period, to within 0.1%."""
    path = tmp_path / "trace.pfw.gz"
    ended = warm.run("-c", RECORD, path, checkpoint)
    assert ended.returncode == 0, ended.stderr
    with open_run(path) as run:
        report = analyse(run)
        tasks = run.tasks()
    add_up(report)
    assert report.steps.step.tolist() == list(range(8))
    assert report.evaluations == 1
    assert report.left.incomplete == 0
    assert len(report.layers) == 6
    for step in report.steps.step.tolist():
        own = tasks.where((tasks.step == step) & (tasks.minibatch == step + 1))
        window = own.end.max() - own.begin.min()
        busy = [(own.end - own.begin)[own.partition == j].sum() for j in range(2)]
        row = report.steps.step.tolist().index(step)
        assert report.steps.window[row] == window
        assert report.steps.bubble[row] == pytest.approx(1 - sum(busy) / 2 / window)
    assert (report.overall.recompute > 0) == (checkpoint != "never")
    assert {"computing", "optimizer", "data_loading"} <= {*parts(report)}
    assert {*LOSSES} <= {*report.overall.parts}


def test_more_partitions_than_processors_are_told(tmp_path):
    """Partitions on the CPU that have to share processors slow each other down, and the verdict says so."""
    texts = []
    for processors in (1, 2):
        made = Made(tmp_path / str(processors), chunks=2, processors=processors)
        for step in range(3):
            made.gpipe(step, lambda phase, i, j: 100, at=step * 1000)
        with open_run(made.write()) as run:
            texts.append(analyse(run).verdict.text)
    assert "2 partitions share 1 processor and slow each other down." in texts[0]
    assert "processor" not in texts[1]


# Replicas.


@pytest.mark.parametrize("said", [True, False])
def test_replicas_of_a_permuted_mesh(tmp_path, said):
    """Ranks belong together as the run says; without that, by their order."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    made.pipeline = {"ranks": [[0, 1], [3, 2]]} if said else {}
    # Ranks 0 and 3 are one pipeline, and 1 and 2 the other, which is three times as slow.
    for step in range(4):
        for ranks, times in (((0, 3), 1), ((1, 2), 3)):
            alone = Made(tmp_path / "alone", balance=[1, 1], chunks=2)
            alone.gpipe(step, lambda phase, i, j, times=times: times * EVEN[phase], at=step * 3000)
            for event in alone.events[0]:
                rank = ranks[event["args"]["partition"]]
                made.events.setdefault(rank, []).append(event)
    report = analysed(made)
    add_up(report)
    assert report.replicas == ({0: 0, 3: 0, 1: 1, 2: 1} if said else {0: 0, 2: 0, 1: 1, 3: 1})
    (pipeline,) = report.pipelines
    windows = sorted(report.steps.window.tolist())
    if said:
        assert windows == [900] * 4 + [2700] * 4
        assert pipeline.bubble == pytest.approx(1 / 3)
    else:
        assert max(windows[:4]) > 900
        assert pipeline.bubble > 0.4


@pytest.mark.parametrize(
    "ranks", ["0", [0, 1], [[0], [1, 2]], [[0, 1]], [["0"], ["1"]], [[], []], [[0, 1], [1, 0]], [[0, 1], [5, 6]]]
)
def test_ranks_that_make_no_sense(tmp_path, ranks):
    """Whatever a file says of ranks, replicas are found."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    made.pipeline = {"ranks": ranks}
    made.gpipe(0, even)
    made.gpipe(0, even, rank=1)
    assert analysed(made).replicas == {0: 0, 1: 1}
