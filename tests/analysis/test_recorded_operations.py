"""Recorded runs are replayed: a run without gaps takes what its replay takes, and what slows it is named."""

from __future__ import annotations

import numpy as np
import pytest

from pipesight.schedule.task_orders import interleaved, one_f_one_b
from support.analysed import EVEN, analysed, even
from support.synthetic import Made


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path / "run", balance=[1, 1], chunks=4)


def test_partitions_of_a_process(made):
    """In one process, partitions are the workers; loading comes before the first forward, the optimizer at the end."""
    at = 0
    for step in range(4):
        made.span("dataloader", "fetch", begin=at, dur=30)
        at = made.gpipe(step, even, at=at + 30)
        made.span("compute", "step", begin=at, dur=50)
        at += 50
    found = analysed(made).what_if
    assert found.replayed == pytest.approx(80 + 5 * 300)
    assert found.recorded == pytest.approx(found.replayed - 30 / 4)  # nothing is loaded after the last
    assert found.slowdown == pytest.approx(1)
    assert set(found.by_worker) == {"0:0", "0:1"}
    assert found.layout.ranks == ((0, 0),)
    assert {"data-loading", "optimizer", "forward-compute"} <= set(found.by_operation)


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 6), interleaved(4, 6, devices=2)])
def test_ranks(tmp_path, schedule):
    """Over ranks, a worker is a rank, which may have several parts; any schedule is replayed as it ran."""
    made = Made(tmp_path / "run", balance=[1] * 4, chunks=6)
    at = 0
    for step in range(3):
        at = made.scheduled(step, schedule, EVEN, at=at)
    found = analysed(made).what_if
    assert found.replayed == pytest.approx(found.recorded) == pytest.approx(at / 3)
    assert set(found.by_worker) == {str(rank) for rank in range(max(schedule.device_of_stage) + 1)}


def test_slow_replica_and_long_partition(tmp_path):
    """The partition that is slower on one replica is named by its rank; one that is long on all of them is a stage."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=4)
    for rank in range(3):
        at = 0
        for step in range(4):
            at = made.gpipe(
                step, lambda p, i, j, r=rank: even(p, i, j) * (2 if (r, j) == (2, 0) else 1), rank=rank, at=at
            )
    found = analysed(made).what_if
    assert [(cause.kind, cause.ranks, cause.partitions) for cause in found.causes] == [("rank", (2,), (0,))]
    assert "Partition 0 of rank 2 slows the job by" in found.verdict
    made = Made(tmp_path / "other", balance=[1, 1], chunks=4)
    at = 0
    for step in range(4):
        at = made.gpipe(step, lambda p, i, j: even(p, i, j) * (1 + j), at=at)
    found = analysed(made).what_if
    assert [(cause.kind, cause.stage) for cause in found.causes] == [("stage", 1)]


def test_long_runs_are_sampled(made, monkeypatch):
    """Of a long run, some steps are replayed, and the report says how many."""
    monkeypatch.setattr("pipesight.analysis.recorded_operations.MOST", 5 * 16)
    at = 0
    for step in range(20):
        at = made.gpipe(step, even, at=at)
    found = analysed(made).what_if
    assert found.steps == 5
    assert found.remarks[-1] == "5 of 20 steps were replayed, evenly chosen"
    assert np.isclose(found.replayed, found.recorded)
