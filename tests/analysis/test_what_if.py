"""Replays say what a job would take without stragglers, and name what slows it; checked against jobs made otherwise."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipesight._formatting import rough_percent
from pipesight.analysis.what_if import what_if
from pipesight.runs.reading.operation_trace import read_operations
from pipesight.schedule.packing import pack
from support.made_jobs import MadeJob

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("PIPESIGHT_STRAGGLER_TRACES") or ROOT.parent / "shared" / "data" / "stragglers")

MEANS = {"forward": 0.1, "backward": 0.2}


def found_in(job: MadeJob, folder: Path):
    return what_if(job.operations(folder))


def seconds(job: MadeJob) -> float:
    return float(np.mean(job.times()))


def uneven(step, replica, task):
    """Return a duration that no other task has."""
    return MEANS[task[0]] * (1 + 0.3 * random.Random(f"{step} {replica} {task}").random())


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("replicas", "stages"), [(1, 1), (1, 3), (3, 2), (2, 4)])
def test_replay_is_the_job(tmp_path, replicas, stages, chunks):
    """A job without delays takes what its replay takes, whatever its layout; and with ideal durations, the ideal."""
    job = MadeJob(replicas, stages, chunks, compute=uneven)
    found = found_in(job, tmp_path)
    assert found.replayed == pytest.approx(seconds(job) * 1e6)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert found.remarks == ()
    durations = {phase: [row[6] for row in job.rows if row[4] == f"{phase}-compute"] for phase in MEANS}
    means = {phase: float(np.mean(values)) for phase, values in durations.items()}
    even = dataclasses.replace(job, compute=lambda step, replica, task: means[task[0]])
    assert found.ideal == pytest.approx(seconds(even) * 1e6)
    assert found.slowdown == pytest.approx(seconds(job) / seconds(even))


def test_scenarios(tmp_path):
    """Only the operations of a kind, a replica or a stage are as recorded; the others are ideal."""
    job = MadeJob(3, 2, compute=uneven)
    found = found_in(job, tmp_path)
    rows = [row for row in job.rows if str(row[4]).endswith("compute")]
    means = {phase: float(np.mean([row[6] for row in rows if row[4] == f"{phase}-compute"])) for phase in MEANS}

    def kept(keep) -> float:
        def compute(step, replica, task):
            return uneven(step, replica, task) if keep(replica, task) else means[task[0]]

        return seconds(dataclasses.replace(job, compute=compute)) * 1e6 / found.ideal

    assert found.by_operation["forward-compute"] == pytest.approx(kept(lambda _, task: task[0] == "forward"))
    for replica in range(3):
        assert found.by_dp_rank[replica] == pytest.approx(kept(lambda own, _, r=replica: own == r))
    for stage in range(2):
        assert found.by_stage[stage] == pytest.approx(kept(lambda _, task, s=stage: task[1] == s))
    assert found.by_worker["5"] == pytest.approx(min(found.by_dp_rank[2], found.by_stage[1]))
    without_last = kept(lambda _, task: task[1] == 0) * found.ideal
    assert found.m_s == pytest.approx((found.replayed - without_last) / (found.replayed - found.ideal))
    slowest = max(found.by_worker, key=found.by_worker.get)
    without_worst = kept(lambda own, task: str(task[1] * 3 + own) != slowest) * found.ideal
    assert found.m_w == pytest.approx((found.replayed - without_worst) / (found.replayed - found.ideal))
    assert found.layout.ranks == ((0, 3), (1, 4), (2, 5))


def usually(step, replica, task):
    """Return what a task takes on a machine with little noise."""
    return MEANS[task[0]] * (1 + 0.01 * random.Random(f"{step} {replica} {task}").random())


def slow_rank(step, replica, task):
    return usually(step, replica, task) * (2 if (replica, task[1]) == (1, 2) else 1)


def long_stage(step, replica, task):
    return usually(step, replica, task) * (1.5 if task[1] == 3 else 1)


def slow_replica(step, replica, task):
    return usually(step, replica, task) * (1.5 if replica == 2 else 1)


def long_sequences(step, replica, task):
    length = random.Random(f"{step} {replica} {task[2]}").random() ** 4
    return usually(step, replica, task) * (1 + (2 if task[0] == "forward" else 3) * length)


def pause(step, replica, task):
    return usually(step, replica, task) + (0.9 if (step, replica, task) == (13, 0, ("forward", 1, 2)) else 0)


@pytest.mark.parametrize(
    ("compute", "kind", "words"),
    [
        (slow_rank, "rank", "Rank 7 slows the job by"),
        (long_stage, "stage", "The last stage is too long: "),
        (slow_replica, "replica", "Data-parallel rank 2 is slow: "),
        (long_sequences, "microbatches", "Micro-batches differ: "),
        (pause, "rank", "Rank 3 slows the job by"),
    ],
)
def test_causes(tmp_path, compute, kind, words):
    """A cause is named, alone, and costs what the job without it saves; with one replica too, but for a slow rank."""
    job = MadeJob(3, compute=compute)
    found = found_in(job, tmp_path)
    assert [cause.kind for cause in found.causes] == [kind]
    assert words in found.verdict
    usual = seconds(dataclasses.replace(job, compute=usually)) * 1e6
    expected = (found.replayed - usual) / found.ideal
    if kind in ("rank", "replica"):
        assert found.causes[0].share == pytest.approx(expected, abs=0.02)
    if kind in ("rank", "stage", "microbatches") and compute is not slow_rank:
        alone = found_in(dataclasses.replace(job, replicas=1), tmp_path)
        assert [cause.kind for cause in alone.causes] == [kind]


def sometimes_faster(step, replica, task):
    return MEANS[task[0]] * (0.5 if random.Random(f"{step} {replica} {task}").random() < 0.2 else 1.0)


@pytest.mark.parametrize("stages", [1, 2])
def test_nobody_is_slow(tmp_path, stages):
    """Where all workers are faster than usual at times, and never slower, none is slow."""
    found = found_in(MadeJob(2, stages, compute=sometimes_faster), tmp_path)
    assert not any(cause.kind in ("rank", "replica", "link") for cause in found.causes)


def only_lengths(step, replica, task):
    return MEANS[task[0]] * (1 + 3 * random.Random(f"{step} {replica} {task[2]}").random() ** 4)


def test_other_orders_of_microbatches(tmp_path):
    """What the longest micro-batches in the middle give, and exchanging some among replicas, is what such jobs take."""
    job = MadeJob(3, 2, microbatches=8, compute=only_lengths)
    found = found_in(job, tmp_path)

    def arranged(exchange):
        def compute(step, replica, task):
            length = [only_lengths(step, k // 8, ("forward", 0, k % 8)) for k in range(24)]
            own = pack(length, 3)[8 * replica : 8 * replica + 8] if exchange else range(8 * replica, 8 * replica + 8)
            k = sorted(own, key=length.__getitem__)
            k = (k[::2] + k[1::2][::-1])[task[2]]
            return only_lengths(step, k // 8, (task[0], task[1], k % 8))

        return seconds(dataclasses.replace(job, compute=compute)) * 1e6

    assert found.reordered == pytest.approx(arranged(False), rel=1e-3)
    assert found.exchanged == pytest.approx(arranged(True), rel=1e-2)
    assert found.causes[0].kind == "microbatches"
    assert found.replayed - found.exchanged >= 0.5 * found.causes[0].share * found.ideal
    assert found_in(dataclasses.replace(job, replicas=1), tmp_path).exchanged is None
    even = found_in(MadeJob(compute=usually), tmp_path)
    assert (even.reordered, even.exchanged) == (None, None)


def test_slow_link(tmp_path):
    """A link that is slow in both directions is named by its ranks."""
    slow = MadeJob(transfer=lambda step, replica, a, b: 0.2 if replica == 1 and {a, b} == {1, 2} else 0.001)
    found = found_in(slow, tmp_path)
    assert [(cause.kind, cause.ranks) for cause in found.causes] == [("link", (3, 5))]
    assert "The link between rank 3 and rank 5 is slow: " in found.verdict


def bursts(step, replica, task):
    return usually(step, replica, task) * (8 if random.Random(f"{step} {task} {replica}").random() < 0.1 else 1)


def test_causes_that_save_more_than_ideal_durations(tmp_path):
    """Some tasks far above the median: what is saved without them exceeds the slowdown, which the verdict explains."""
    found = found_in(MadeJob(1, compute=bursts), tmp_path)
    assert sum(cause.share for cause in found.causes) > found.slowdown - 1 + 0.05
    assert found.verdict.endswith(
        "more than the whole slowdown: ideal durations are means, and slow calls are in them."
    )


def test_no_straggler(tmp_path):
    """An even job has no cause, and with no slowdown at all there is no share of it."""
    assert found_in(MadeJob(compute=usually), tmp_path).verdict.startswith("No straggler")
    even = found_in(MadeJob(), tmp_path)
    assert even.slowdown == pytest.approx(1)
    assert even.m_w is None
    assert even.m_s is None


def test_error_is_told(tmp_path):
    """Where the replay is not the recorded step, the report says by how much."""
    found = found_in(MadeJob(delay=0.05), tmp_path)
    assert found.error > 0.05
    assert f"the recorded step is {rough_percent(found.error)} longer than the replayed one" in found.remarks[0]


@pytest.mark.parametrize("missing", [0, 3, 5])
def test_worker_that_was_not_recorded(tmp_path, missing):
    """No link is named that has an end which was not recorded, and nobody else suffers from what is missing."""
    job = MadeJob(2, 3, transfer=lambda step, replica, source, target: 0.1 if replica else 0.01)
    path = job.write(tmp_path / "trace.parquet")
    table = pq.read_table(path)
    pq.write_table(table.filter(pc.not_equal(table["rank"], missing)), path)
    found = what_if(read_operations(path))
    links = [cause.ranks for cause in found.causes if cause.kind == "link"]
    assert all(missing not in ranks and ranks[0] % 2 == ranks[1] % 2 == 1 for ranks in links)
    assert found.layout.ranks[missing % 2][missing // 2] is None


def test_single_worker_has_no_link(tmp_path):
    """Of a worker that was recorded alone, messages are slow, and not a link to itself."""
    path = MadeJob(2, 3, transfer=lambda step, replica, source, target: 0.01 + 0.2 * (step == 3)).write(
        tmp_path / "trace.parquet"
    )
    table = pq.read_table(path)
    pq.write_table(table.filter(pc.equal(table["rank"], 2)), path)
    assert "link" not in {cause.kind for cause in what_if(read_operations(path)).causes}


def test_message_without_sender(tmp_path):
    """A worker that was not recorded leaves messages with one end."""
    operations = MadeJob().operations(tmp_path)
    found = what_if(operations.where((operations.replica != 1) | (operations.stage != 2)))
    assert found.remarks[-1].startswith("72 messages without the other end")
    assert found.layout.ranks[1] == (1, 3, None, 7)


# Jobs that nobody here ran, and what was published about them.

PUBLISHED = {
    "AR": {
        "replayed": 46.336e6,
        "ideal": 23.485e6,
        "m_w": 1.002,
        "m_s": -0.001,
        "error": 0.0068,
        "by_dp_rank": [1.973, 1.011, 1.011, 1.011],
        "by_stage": [1.979, 0.997, 0.996, 1.002],
        "by_operation": {"backward-compute": 1.581, "forward-compute": 1.369, "grads-reduce-scatter": 1.011},
        "verdict": "Rank 0 slows the job by 1.97 times.",
    },
    "ST": {
        "replayed": 2.1727e6,
        "ideal": 1.8433e6,
        "m_w": 0.031,
        "m_s": 1.219,
        "error": 0.0192,
        "by_dp_rank": [1.173, 1.178],
        "by_stage": [0.998, 0.983, 0.982, 1.232],
        "by_operation": {"forward-compute": 1.087, "backward-compute": 1.074, "embedding-grads-all-reduce": 1.01},
        "verdict": "The last stage is too long: 22% of an ideal step.",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_answers(name):
    """Production traces get the answers of those who published them: far closer than two percent."""
    path = TRACES / f"trace-{name}.parquet"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {TRACES}: set PIPESIGHT_STRAGGLER_TRACES to its folder")
    found, published = what_if(read_operations(path)), PUBLISHED[name]
    assert found.replayed == pytest.approx(published["replayed"], rel=3e-4)
    assert found.ideal == pytest.approx(published["ideal"], rel=1e-4)
    for key in ("m_w", "m_s", "error"):
        assert getattr(found, key) == pytest.approx(published[key], abs=2e-3)
    assert list(found.by_dp_rank.values()) == pytest.approx(published["by_dp_rank"], abs=2e-3)
    assert list(found.by_stage.values()) == pytest.approx(published["by_stage"], abs=2e-3)
    for kind, slowdown in published["by_operation"].items():
        assert found.by_operation[kind] == pytest.approx(slowdown, abs=2e-3)
    assert found.verdict.endswith(published["verdict"])
