"""Waits in collectives: each belongs to what the rank did that came last, which is named, as far as clocks can tell."""

from __future__ import annotations

import json

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.cli import main
from pipesight.runs.reading.run import open_run
from support.synthetic import Made

RANKS, STEPS = 4, 8
WINDOW, WORK, NETWORK = 600, 1000, 20
"""Microseconds: of a mini-batch, of the rank that is slow, and of the network once all are there."""


def clocks(error=0):
    """Return what run.json says of clocks, given the error of each rank, in nanoseconds."""
    return {"error_ns": error, "ranks": {str(rank): {"error_ns": error} for rank in range(1, RANKS)}}


def gathered(made, at, ready, *, ranks=range(RANKS), name="all_gather", step=0, late=False):
    """Add a collective to which ranks come when they are ready; return when it ends."""
    end = max(ready.values()) + NETWORK
    group = ",".join(map(str, ranks))
    for rank in ranks:
        span = {"rank": rank, "step": step, "group": group, "size": 64}
        if late:  # started in the background, and waited for 5 microseconds later
            made.span("comm", name, begin=at + ready[rank], dur=2, **span, **{"async": True})
            made.span("comm", f"{name}.wait", begin=at + ready[rank] + 5, dur=end - ready[rank] - 5, **span)
        else:
            made.span("comm", name, begin=at + ready[rank], dur=end - ready[rank], **span, **{"async": False})
    return at + end


SPANS = {"data_loading": ("dataloader", "fetch.iter"), "optimizer": ("compute", "step"), "between_steps": None}


def made(folder, doing="data_loading", *, guilty=3, clock=None, missing=False, late=False):
    """Make a run of ranks of which one does something for long before every step."""
    run = Made(folder, balance=[1] * RANKS, chunks=1, clock=clocks() if clock is None else clock)
    run.pipeline = {"ranks": [[rank] for rank in range(RANKS)]}
    at = 0
    for step in range(STEPS):
        if SPANS[doing] is not None:
            run.span(*SPANS[doing], begin=at, dur=WORK, rank=guilty, step=step)
        ready = dict.fromkeys(range(RANKS), 10) | {guilty: WORK}
        at = gathered(run, at, ready, step=step, late=late)
        if missing and step % 2:
            run.events[1].pop()
        for j in range(RANKS):
            task = {"partition": j, "microbatch": 0, "rank": j, "dur": WINDOW // (2 * RANKS)}
            run.task(step, phase="forward", begin=at + j * task["dur"], **task)
            run.task(step, phase="backward", begin=at + (2 * RANKS - 1 - j) * task["dur"], **task)
        at += WINDOW
    return run.write()


def analysed(folder):
    with open_run(folder) as run:
        return analyse(run)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("doing", SPANS)
def test_the_cause_is_named(tmp_path, doing, late):
    """A rank that is slow costs all ranks what it does, however many there are, and that is no communication."""
    report = analysed(made(tmp_path / "run", doing, late=late))
    parts = report.overall.parts
    # The last step has no work after it: the period of a step ends where the next begins.
    share = (report.overall.steps - 1) / report.overall.steps
    assert parts["communication"] == pytest.approx(NETWORK * share, abs=5)
    assert parts[doing] == pytest.approx(WORK * share, abs=12)
    (held,) = report.held
    assert (held.rank, held.doing, held.ranks) == (3, doing, (0, 1, 2))
    assert held.wait == pytest.approx((WORK - 10) * share, abs=10)
    (collective,) = report.collectives
    assert (collective.name, collective.ranks, collective.bytes) == ("all_gather", (0, 1, 2, 3), 64)
    assert (collective.last, collective.last_share) == (3, 1.0)
    assert collective.time == pytest.approx(NETWORK, abs=5)
    assert collective.bandwidth == pytest.approx(64 / NETWORK * 1e6)
    # In the background, the last rank does something else for 5 of its 20 microseconds; the others wait already.
    assert collective.overlap == pytest.approx(5 / (RANKS * NETWORK) if late else 0)
    assert collective.wait == pytest.approx(WORK - 10, abs=10)


def test_terminal_and_json(tmp_path, capsys):
    """Both name the rank, what it does, and every collective with its group, size and who came last."""
    folder = str(made(tmp_path / "run"))
    assert main(["report", folder, "--width", "120"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Look at rank 3: the others wait for its data loading." in text
    assert "rank 3: data loading keeps ranks 0-2 waiting" in text
    assert (
        "all_gather of 64 B among ranks 0-3: 8 calls, 20.0 µs each (3.05 MiB/s), after 990 µs of waiting; rank 3"
        in text
    )
    assert main(["report", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held"][0]["rank"] == 3
    assert found["held"][0]["doing"] == "data_loading"
    assert found["collectives"][0]["last"] == 3


def test_within_the_error_of_clocks_nobody_is_blamed(tmp_path):
    """What may be an error of clocks stays communication, and no rank is said to have come last."""
    error = (WORK + 100) * 1000  # nanoseconds
    for clock in (clocks(error), {"error_ns": None, "ranks": {}}):
        report = analysed(made(tmp_path / f"run{clock['error_ns']}", clock=clock))
        assert report.held == ()
        assert report.overall.parts["communication"] > report.overall.parts["data_loading"]
        assert [collective.last for collective in report.collectives] == [None]


def test_calls_that_are_missing(tmp_path):
    """Of steps in which a rank's call was not recorded, nothing is said."""
    report = analysed(made(tmp_path / "run", missing=True))
    assert report.collectives[0].calls == STEPS / 2
    assert report.held[0].steps < STEPS / 2
    assert report.overall.parts["communication"] > 10 * NETWORK


def test_a_rank_that_waited_itself(tmp_path):
    """Where the last rank waited for another, in a collective of others, that one is the cause."""
    run = Made(tmp_path / "run", balance=[1] * RANKS, chunks=1, clock=clocks())
    run.pipeline = {"ranks": [[rank] for rank in range(RANKS)]}
    at = 0
    for step in range(STEPS):
        run.span("checkpoint", "write", begin=at, dur=WORK, rank=3, step=step)
        end = gathered(run, at, {2: 5, 3: WORK}, ranks=(2, 3), name="all_reduce", step=step) - at
        at = gathered(run, at, {0: 10, 1: 10, 2: end, 3: end}, step=step)
        for j in range(RANKS):
            task = {"partition": j, "microbatch": 0, "rank": j, "dur": WINDOW // (2 * RANKS)}
            run.task(step, phase="forward", begin=at + j * task["dur"], **task)
            run.task(step, phase="backward", begin=at + (2 * RANKS - 1 - j) * task["dur"], **task)
        at += WINDOW
    report = analysed(run.write())
    assert [(held.rank, held.doing, held.ranks) for held in report.held] == [(3, "checkpoints", (0, 1, 2))]
    assert report.overall.parts["checkpoints"] == pytest.approx(WORK * (STEPS - 1) / STEPS, rel=0.02)
