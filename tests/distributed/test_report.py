"""The report on runs of several ranks: one timeline on one clock, whatever their own clocks say, and its numbers."""

import json

import numpy as np
import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.described_pipelines import pipelines_of
from pipesight.analysis.step_times import PARTS
from pipesight.plan import one_f_one_b, simulate
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, WEIGHT
from pipesight.runs.reading.run import open_run
from pipesight.view.payload.size_limits import Limits
from pipesight.view.payload.step_timelines import StepTimelines
from support.commands import pipesight
from support.schemas import validated
from support.torchrun import RANK, torchrun

# The clock of rank 2 is seven seconds ahead, and gains a millisecond a second.
CLOCKS = """
import os, time
if os.environ["RANK"] == "2":
    ticks, wall = time.perf_counter_ns, time.time_ns
    time.perf_counter_ns = lambda: ticks() + ticks() // 1000
    time.time_ns = lambda: wall() + 7_000_000_000
"""
TRAIN = """
import pipesight
def train(model, balance, steps, name="RUN", **options):
    pipeline = DistributedPipeline(model, balance, loss_fn=nn.functional.mse_loss, **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    with pipesight.observe(os.path.join(folder, name)):
        for _ in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            pipeline.step(x, x)
            optimizer.step()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record six steps of four ranks; the third computes half as long again, stalls once, and has another clock."""
    folder = tmp_path_factory.mktemp("recorded")
    body = """
    model = sleeping([20, 20, 30, 20], [40, 40, 60, 40])
    calls = iter(range(1000))
    model[2].register_forward_pre_hook(lambda *_: time.sleep(0.5 if next(calls) == 4 * 8 + 2 else 0))
    train(model, [1, 1, 1, 1], 6, chunks=8, schedule="1f1b")
    """
    torchrun(4, body, folder, begin=CLOCKS + RANK + TRAIN)
    return folder / "RUN"


@pytest.fixture(scope="module")
def report(recorded):
    with open_run(recorded) as run:
        return analyse(run)


def clock_of(run, rank):
    path = run / "run.json" if rank == 0 else run / "ranks" / f"rank-{rank:05}.json"
    return validated("run", json.loads(path.read_text()))["clock"]


def test_offset_and_drift_are_found(recorded):
    """Each rank says how its clock differs from rank 0's, and how well that is known; `run.json` has them all."""
    everyone = clock_of(recorded, 0)
    assert sorted(everyone["ranks"]) == ["1", "2", "3"]
    assert everyone["error_ns"] == max(clock["error_ns"] for clock in everyone["ranks"].values())
    for rank in (1, 2, 3):
        own = clock_of(recorded, rank)
        assert {name: own[name] for name in own if name != "offset_ns"} == everyone["ranks"][str(rank)]
        assert 0 < own["error_ns"] < 10_000_000
        ahead, drift = (7_000_000_000, 1e-3) if rank == 2 else (0, 0.0)
        # Of four seconds or so, what the errors of both ends may come to.
        assert own["drift"] == pytest.approx(-drift / (1 + drift), abs=own["error_ns"] / 1e9)
        assert own["offset_correction_ns"] == pytest.approx(-ahead, abs=20_000_000)


def test_memory_of_each_rank(report):
    """Each rank counts its own partition: 1F1B keeps fewer micro-batches, the nearer a partition is to the last."""
    entries = report.memory.partitions
    assert [(entry.partition, entry.rank) for entry in entries] == [(j, j) for j in range(4)]
    microbatch = 2 * 4 * 4
    assert [entry.parts["inputs"] for entry in entries[1:3]] == [3 * microbatch, 2 * microbatch]


def test_one_clock(recorded):
    """On the common clock no task begins before the one that made its input has ended."""
    error = clock_of(recorded, 0)["error_ns"] // 1000 + 1
    with open_run(recorded) as run:
        tasks = run.tasks()
    begin, end = (np.zeros((4, 6, 4, 8), np.int64) for _ in range(2))
    where = (tasks.phase, tasks.step, tasks.partition, tasks.microbatch)
    begin[where], end[where] = tasks.begin, tasks.end
    for phase, later, earlier in ((FORWARD, slice(1, 4), slice(0, 3)), (BACKWARD, slice(0, 3), slice(1, 4))):
        waits = begin[phase][:, later] - end[phase][:, earlier]
        assert waits.min() >= -error
        assert np.median(waits.min(axis=(0, 2))) < 20_000  # of seven seconds


def test_lanes_and_tasks(recorded, report):
    """There is a lane for each partition, on its rank, with each task once."""
    assert report.ranks == (0, 1, 2, 3)
    (pipeline,) = report.pipelines
    assert [(row.partition, row.ranks) for row in pipeline.rows] == [(j, (j,)) for j in range(4)]
    assert (pipeline.partitions, pipeline.chunks, pipeline.replicas, pipeline.facts.schedule) == (4, 8, 1, "1f1b")
    assert report.left.incomplete == 0
    assert len(report.tasks) == 6 * 4 * 8 * 2
    with open_run(recorded) as run:
        lines = StepTimelines(report.minibatches, report.tasks, run.spans(), run.transfers(), limits=Limits())
    assert [(lane.rank, lane.partition, lane.replica) for lane in lines.lanes] == [(j, j, 0) for j in range(4)]
    drawn = lines.step(3)
    assert sorted(drawn["tasks"]["lane"]) == sorted([0, 1, 2, 3] * 16)
    assert sorted(drawn["transfers"]["lane"]) == sorted([0, 3] * 8 + [1, 2] * 16)
    sizes = {(layer.partition, layer.name): layer.output_bytes for layer in pipeline.facts.layers}
    assert sizes == {(j, str(j)): 16 * 4 * 4 for j in range(4)}  # each from the rank that has the layer


def time_of_tasks(report, steps, *phases):
    """Return the microseconds of the tasks of each step and partition, of some phases or of all."""
    tasks, found = report.tasks, np.zeros((steps, 1 + report.tasks.partition.max()))
    mine = np.isin(tasks.phase, phases) | (not phases)
    np.add.at(found, (tasks.step[mine], tasks.partition[mine]), (tasks.end - tasks.begin)[mine])
    return found


def test_the_lost_time(report):
    """Computing and losses add up to the window on every rank, and each loss is what it should be."""
    assert report.steps.parts.sum(axis=0) == pytest.approx(report.steps.period, rel=1e-9)
    (pipeline,) = report.pipelines
    window = pipeline.window.mean
    busy = time_of_tasks(report, 6)[report.steps.step[report.counted]].mean(axis=0)
    for row in pipeline.rows:
        assert row.busy + sum(row.losses.values()) == pytest.approx(window)
        assert row.bubble == pytest.approx(1 - row.busy / window)
        assert row.busy == pytest.approx(busy[row.partition])
        assert row.busy >= 8 * (90_000 if row.partition == 2 else 60_000)
    # The slow partition has no wait but to fill and to drain; the others wait for it as well. Sleeps may take longer.
    tasks, long = report.tasks, report.tasks.end - report.tasks.begin
    usual = [
        [np.median(long[(tasks.partition == j) & (tasks.phase == p)]) for p in (FORWARD, BACKWARD)] for j in range(4)
    ]
    each = np.sum(usual, axis=1)
    slow, others = pipeline.rows[2], [row for row in pipeline.rows if row.partition != 2]
    for row in others:
        assert row.losses["imbalance"] == pytest.approx(8 * (each[2] - each[row.partition]), rel=0.35)
        assert row.losses["imbalance"] > slow.losses["imbalance"] + 150_000
        assert row.bubble > slow.bubble + 0.15
    assert slow.losses["fill_and_drain"] == pytest.approx(3 * each.mean(), rel=0.35)
    # A wait for a tensor that is not made yet is no transfer: those take a moment only.
    assert slow.losses["transfers"] + slow.losses["host_gaps"] < 0.15 * window


def test_the_straggler(report):
    """The rank that held the others up in one step is named, with the step."""
    (stalled,) = [straggler for straggler in report.stragglers if straggler.rank == 2]
    own = time_of_tasks(report, 6)[:, 2]
    assert (stalled.partition, stalled.bursts) == (2, (4,))
    assert stalled.burst == pytest.approx(own[4] / np.median(own), rel=0.1)
    assert own[4] >= 8 * 90_000 + 500_000


def test_in_the_terminal(recorded):
    """`pipesight report` draws one timeline of all ranks, and has a row for each partition with its rank."""
    done = pipesight("report", recorded)
    assert done.returncode == 0, done.stderr
    assert "4 ranks, 6 steps" in done.stdout
    drawn = [line for line in done.stdout.splitlines() if line[:3] in {"  0", "  1", "  2", "  3"} and "│" in line]
    assert len(drawn) == 4
    for line in drawn:
        assert line.index("F") < line.index("B0") < line.index("B7")
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  ") and "%" in line]
    assert [[str(j), str(j)] in rows for j in range(4)] == [True] * 4


def test_bubble_of_1f1b(tmp_path):
    """The bubble is that of the simulated schedule with the measured times of tasks, and what transfers add to it."""
    body = """
    train(sleeping([75] * 4, [150] * 4), [1] * 4, 2, chunks=8, schedule="1f1b")
    """
    torchrun(4, body, tmp_path, begin=RANK + TRAIN)
    with open_run(tmp_path / "RUN") as run:
        found = analyse(run)
        tasks = run.tasks()
    lengths, windows, idle = np.zeros((4, 4, 8, 2)), np.zeros(2), np.zeros(2)
    lengths[tasks.phase, tasks.partition, tasks.microbatch, tasks.step] = tasks.end - tasks.begin
    for step in range(2):
        mine = tasks.step == step
        windows[step] = tasks.end[mine].max() - tasks.begin[mine].min()
        idle[step] = windows[step] - lengths[..., step].sum() / 4
    assert found.steps.bubble == pytest.approx(idle / windows)
    assert found.overall is not None
    assert found.overall.bubble == pytest.approx(idle[found.counted].sum() / windows[found.counted].sum())
    simulated = simulate(one_f_one_b(4, 8), lengths)
    late = found.steps.parts[[PARTS.index("transfers"), PARTS.index("host_gaps")]].sum(axis=0)
    assert idle - late == pytest.approx(simulated.bubble * simulated.makespan)
    assert found.overall.bound == pytest.approx(3 / 11, rel=0.02)  # of tasks of one length
    (loss,) = [curve for curve in found.curves if curve.name == "loss"]  # of the last rank
    assert loss.steps == (0, 1)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Record two pipelines side by side, and then one with two partitions a rank and backwards in two parts."""
    folder = tmp_path_factory.mktemp("others")
    body = """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    times = 2 if rank == 1 else 1
    train(sleeping([times * 10, 10], [times * 20, 20]), [1, 1], 3, name="SIDE", chunks=4, mesh=mesh)
    crossed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("pp", "dp"))
    train(sleeping([10, 10], [20, 20]), [1, 1], 3, name="CROSSED", chunks=4, mesh=crossed)
    train(sleeping([10] * 8, [20] * 8), [1] * 8, 3, name="SPLIT", chunks=4, schedule="interleaved-zero-bubble")
    """
    torchrun(4, body, folder, begin=RANK + TRAIN)
    return folder


def analysed(path):
    with open_run(path) as run:
        report = analyse(run)
    assert report.steps.parts.sum(axis=0) == pytest.approx(report.steps.period, rel=1e-9)
    assert report.left.incomplete == 0
    assert not report.remarks
    (pipeline,) = report.pipelines
    for row in pipeline.rows:
        assert row.busy + sum(row.losses.values()) == pytest.approx(pipeline.window.mean)
    return report, pipeline


def test_pipelines_side_by_side(others):
    """Ranks with the same partitions are replicas: their windows are apart, and a partition names all its ranks."""
    report, pipeline = analysed(others / "SIDE")
    assert (pipeline.partitions, pipeline.replicas, pipeline.minibatches) == (2, 2, 2 * 3)
    assert [row.ranks for row in pipeline.rows] == [(0, 1), (2, 3)]
    assert report.description["pipelines"][0]["ranks"] == [[0, 1], [2, 3]]
    assert len(report.tasks) == 3 * 4 * 4 * 2
    slowest = report.stragglers[0]  # by the other rank with the same partition
    assert (slowest.rank, slowest.partition) == (1, 0)
    tasks = report.tasks
    took = [(tasks.end - tasks.begin)[tasks.rank == rank].sum() for rank in (0, 1)]
    assert slowest.slower == pytest.approx(took[1] / took[0], rel=0.25)


def test_pipelines_that_cross(others):
    """Ranks are paired as the mesh has them, which need not be by their order: tensors go between these alone."""
    report, _ = analysed(others / "CROSSED")
    assert report.description["pipelines"][0]["ranks"] == [[0, 1], [3, 2]]
    assert report.replicas == {0: 0, 3: 0, 1: 1, 2: 1}
    assert {(link.source, link.target, link.replica) for link in report.links} == {
        (0, 3, 0),
        (3, 0, 0),
        (1, 2, 1),
        (2, 1, 1),
    }
    with open_run(others / "CROSSED") as run:
        lines = StepTimelines(
            report.minibatches, report.tasks, run.spans(), run.transfers(), limits=Limits(), replicas=report.replicas
        )
    assert [(lane.rank, lane.replica) for lane in lines.lanes] == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_split_backwards(others):
    """Both parts of a backward count, and partitions of one rank take turns."""
    report, pipeline = analysed(others / "SPLIT")
    assert [row.ranks for row in pipeline.rows] == [(j % 4,) for j in range(8)]
    assert (pipeline.devices, pipeline.facts.schedule) == (4, "interleaved-zero-bubble")
    phases = np.bincount(report.tasks.phase, minlength=4)
    # A schedule may leave some backwards in one piece.
    assert phases[[0, 1, 2]].tolist() == [3 * 8 * 4, 0, 3 * 8 * 4]
    assert 0 < phases[3] <= 3 * 8 * 4
    # Ranks compute for one partition at a time, so theirs is the bubble.
    assert pipeline.workers == 4
    assert [report.overall.bubble, pipeline.bubble] == pytest.approx([pipeline.device_idle] * 2)
    assert report.overall.parts["sharing"] == 0
    assert all(row.phases["weight"] >= 0 and row.losses["sharing"] > 0 for row in pipeline.rows)
    longest = time_of_tasks(report, 3, BACKWARD, WEIGHT).max(axis=0) / 4
    for layer in report.layers:  # of the first one too, which is all about weights
        assert 20_000 <= layer.backward <= longest[layer.partition]


@pytest.mark.parametrize(("hosts", "processors"), [(["a"], 2), (["a", "b"], None)])
def test_processors_of_several_machines(hosts, processors):
    """Partitions on several machines do not share the processors of one."""
    entry = {"partitions": 2, "ranks": [[0], [1]], "devices": ["cpu", "cpu"]}
    (facts,) = pipelines_of({"pipelines": [entry], "hosts": hosts, "processors": 2})
    assert facts.processors == processors
