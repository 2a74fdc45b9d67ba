"""A process that is stopped while it waits is named, though to the others its collective only takes long."""

from __future__ import annotations

import pytest

from support.analysed import analysed
from support.synthetic import START, Made

RANKS, STEPS, TASK, NETWORK, STOP = 3, 6, 100, 20, 4000


def made(folder, stopped, *, told=True, where="collective"):
    """Make a run whose rank ``stopped`` is stopped once: in a collective before a step, or waiting for a message."""
    run = Made(folder, balance=[1] * RANKS, chunks=1, clock={"error_ns": 0, "ranks": {"1": {"error_ns": 0}}})
    run.pipeline = {"ranks": [[rank] for rank in range(RANKS)]}
    at = 0
    for step in range(STEPS):
        long = STOP if step == 3 and where == "collective" else 0
        for rank in range(RANKS):
            group = ",".join(map(str, range(RANKS)))
            span = {"rank": rank, "step": step, "group": group, "size": 64, "async": False}
            run.span("comm", "all_reduce", begin=at, dur=NETWORK + long, **span)
        at += NETWORK + long
        if long and told:
            instant(run, stopped, at - 5, STOP - 10)
        for phase in ("forward", "backward"):
            for j in range(RANKS) if phase == "forward" else reversed(range(RANKS)):
                run.task(step, phase=phase, begin=at, partition=j, microbatch=0, rank=j, dur=TASK)
                at += TASK
    return run


def instant(run, rank, at, microseconds):
    """Say that the process of a rank was stopped until then."""
    values = {"microseconds": microseconds}
    event = {"id": 1, "name": "process stopped", "cat": "instant", "pid": 4000 + rank, "tid": 4000 + rank}
    run.events[rank].append({**event, "ts": START + at, "ph": "i", "s": "t", "args": values, "point": values})


@pytest.mark.parametrize("stopped", range(RANKS))
def test_stopped_in_a_collective(tmp_path, stopped):
    """The rank that was stopped is the cause, not the collective; the replay takes as long as the recording."""
    found = analysed(made(tmp_path / "run", stopped)).what_if
    assert [(cause.kind, cause.ranks, cause.operation) for cause in found.causes] == [("rank", (stopped,), "host")]
    assert found.error == pytest.approx(0, abs=0.02)
    unknown = analysed(made(tmp_path / "other", stopped, told=False)).what_if
    assert [cause.kind for cause in unknown.causes] == ["collective"]
