"""Pipelines, replicas and layers: which ranks and partitions make one up, and its bubble."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipesight.analysis.analyse import measure
from pipesight.analysis.comparison import compare
from pipesight.runs.reading.run import open_run
from pipesight.schedule.task_orders import interleaved
from pipesight.view.text_report import render
from support.analysed import EVEN, add_up, analysed, even, parts
from support.synthetic import Made


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


def test_bubble_of_workers_in_one_process(tmp_path):
    """Partitions that share a worker of a process take turns there: the bubble and its bound are those of workers."""
    made = interleaved_run(tmp_path / "run", 4)
    made.events = {0: [{**event, "pid": 4000} for rank in (0, 1) for event in made.events[rank]]}
    made.pipeline = {"schedule": "interleaved-1f1b", "workers": [0, 1, 0, 1]}
    (pipeline,) = analysed(made).pipelines
    assert (pipeline.partitions, pipeline.workers) == (4, 2)
    assert [pipeline.bubble, pipeline.bound] == pytest.approx([1 / 17] * 2)


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
