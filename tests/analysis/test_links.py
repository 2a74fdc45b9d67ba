"""Links between ranks: how long messages take, what waiting for them costs, and which link is named."""

from __future__ import annotations

import re

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.planned_changes import AT_MOST
from pipesight.runs.reading.run import open_run
from pipesight.view.report_json import as_json
from pipesight.view.text_report import render
from support.schemas import validated
from support.synthetic import Made

STEPS, PAUSE = 5, 100
SLOW = {(0, 1): 10, (1, 2): 1000, (2, 1): 800, (1, 0): 10}


def clocks(*errors):
    """Return what run.json says of clocks, given the errors of ranks 1 and so on, in nanoseconds."""
    return {"error_ns": max(errors), "ranks": {str(rank): {"error_ns": e} for rank, e in enumerate(errors, 1)}}


def made(folder, delays, *, ranks=3, hosts=("near", "near", "far"), size=65536, pieces=1, **description):
    """Make a run of a partition a rank and two micro-batches, with messages that take as long as ``delays`` say.

    With `SLOW`, a step is, W a wait, each of them for what was sent by then (^)::

        rank 0  0 F0 100 F1 200 W                                                  2620 B1 2820 B0 3020
        rank 1  0 W 110 F0 210 F1 310 W                         2410 B1 2610^B0 2810
        rank 2  0 W            210^     1210 F0 1310 F1 1410 B1 1610^B0 1810
    """
    run = Made(folder, balance=[1] * ranks, chunks=2, host=hosts[0], **description)
    run.pipeline = {"ranks": [[rank] for rank in range(ranks)]}
    run.ranks = {rank: {"rank": rank, "host": hosts[rank], "pipelines": []} for rank in range(1, ranks)}
    at = 0
    for step in range(STEPS):
        free, ended = [at] * ranks, {}
        order = [("forward", i, j, j - 1, 100) for i in (0, 1) for j in range(ranks)]
        order += [("backward", i, j, j + 1, 200) for i in (1, 0) for j in reversed(range(ranks))]
        for phase, i, j, source, dur in order:
            begin = free[j]
            if 0 <= source < ranks:
                there = max(begin, ended[phase, i, source] + delays[source, j])
                for piece in range(pieces):
                    until = there if piece == pieces - 1 else begin
                    run.transfer(
                        step, partition=j, microbatch=i, begin=begin, dur=until - begin, size=size // pieces, rank=j
                    )
                begin = there
            run.task(step, partition=j, microbatch=i, phase=phase, begin=begin, dur=dur, rank=j)
            ended[phase, i, j] = free[j] = begin + dur
        at = max(free) + PAUSE
        for rank in range(ranks):
            run.span("compute", "step", begin=max(free), dur=PAUSE, rank=rank)
    return run


def analysed(run, **options):
    with open_run(run.write()) as opened:
        report = analyse(opened, **options)
    assert report.steps.parts.sum(axis=0) == pytest.approx(report.steps.period, rel=1e-9)
    validated("report", as_json(report))
    return report


def named(report):
    return [(link.source, link.target) for link in report.links if link.notable]


@pytest.mark.parametrize("pieces", [1, 2])
def test_times_and_waits_of_every_link(tmp_path, pieces):
    """Both ways of each link have their times; several tensors of a task are one message."""
    report = analysed(made(tmp_path / "run", SLOW, pieces=pieces, clock=clocks(2000, 3000)))
    assert report.overall is not None
    assert report.overall.time.median == 3020 + PAUSE
    found = {(link.source, link.target): link for link in report.links}
    assert found.keys() == SLOW.keys()
    for way, time in SLOW.items():
        link = found[way]
        # Of both messages in a step, the receiver waits for one already when it is sent.
        assert (link.time, link.messages, link.timed) == (time, 2 * STEPS, STEPS)
        assert (link.size, link.bytes) == (65536, 65536 * 2 * STEPS)
        assert link.wait == time
        assert link.share == pytest.approx(time / 3120)
        assert link.bandwidth == pytest.approx(65536 / time * 1e6)
        assert link.overlap == pytest.approx(0.5)  # the other one travels while the receiver computes
    assert (found[1, 2].source_host, found[1, 2].target_host, found[1, 2].partitions) == ("near", "far", (2,))
    assert (found[1, 2].others, found[0, 1].others) == (10, 900)
    assert (found[0, 1].error, found[2, 1].error) == (2, 5)
    assert next(iter(found)) == (1, 2)  # it costs most


def test_the_slow_link_is_named(tmp_path):
    """The report names the link that is slow, both ways, with hosts and figures, and advises to look there."""
    report = analysed(made(tmp_path / "run", SLOW, clock=clocks(2000, 3000)))
    assert named(report) == [(1, 2), (2, 1)]
    text = render(report, width=120)
    block = text[text.index("\nLinks\n") + 1 :].splitlines()
    assert block == [
        "Links",
        "  rank 1 on near -> rank 2 on far: 1.00 ms for 64.0 KiB, others 10.0 µs; costs 32.1% of the step",
        "  rank 2 on far -> rank 1 on near: 800 µs for 64.0 KiB, others 10.0 µs; costs 25.6% of the step",
        "",
        "Messages",
        "  40 messages of 2.50 MiB in total over 4 links, 62.5 MiB/s to 6.10 GiB/s; nobody waits for 50% of",
        "    their time on the way",
    ]
    change = report.verdict.changes[0]
    assert change.what == "check the network between far and near; use larger micro-batches or fewer cuts there"
    assert change.why == "a message from rank 1 to rank 2 takes 1.00 ms, and 10.0 µs on other links"
    assert change.gain == pytest.approx(1800 / 3120)
    assert change.promise == AT_MOST
    assert not [other for other in report.verdict.changes if other.what.startswith("send less")]
    assert re.search(r"  at most +\N{MINUS SIGN}58%  check the network between far and near;", text)


@pytest.mark.parametrize("clock", [clocks(2000, 1_100_000), clocks(600_000, 500_000), {"error_ns": None, "ranks": {}}])
def test_clocks_that_are_not_good_enough(tmp_path, clock):
    """No link is named whose times are within the error of the clocks; what is lost is told all the same."""
    report = analysed(made(tmp_path / "run", SLOW, clock=clock))
    assert not named(report)
    assert "\nLinks\n" not in render(report)
    assert report.verdict.changes[0].what.startswith("send less data between partitions")


def test_links_that_are_alike(tmp_path):
    """Links that cost little are not named, nor is one of which the sender is late."""
    report = analysed(made(tmp_path / "run", dict.fromkeys(SLOW, 10), clock=clocks(1000, 1000)))
    assert [link.time for link in report.links] == [10] * 4
    assert not named(report)


def test_links_that_all_cost_much(tmp_path):
    """Where all networks are slow, all are named: none is faster to compare with, but much is lost."""
    slow = dict.fromkeys(SLOW, 500)
    report = analysed(made(tmp_path / "run", slow, hosts=["a", "b", "c"], clock=clocks(1000, 1000)))
    assert sorted(named(report)) == sorted(SLOW)
    assert [change.what[:31] for change in report.verdict.changes[:2]] == [
        "check the network between a and",
        "check the network between b and",
    ]


def test_one_host_has_no_network(tmp_path):
    """Links of one host that are all alike are not named, and what they lose is told of transfers as a whole."""
    slow = dict.fromkeys(SLOW, 500)
    report = analysed(made(tmp_path / "run", slow, hosts=["here"] * 3, clock=clocks(1000, 1000)))
    assert not named(report)
    change = report.verdict.changes[0]
    assert change.what.startswith("send less data between partitions")
    assert report.overall is not None
    assert change.gain == pytest.approx(report.overall.parts["transfers"] / report.overall.time.mean)


def test_a_slow_link_on_one_host(tmp_path):
    """Ranks of one host have no network between them: what else they share is to be checked."""
    report = analysed(made(tmp_path / "run", SLOW, hosts=["near"] * 3, clock=clocks(1000, 1000)))
    assert named(report) == [(1, 2), (2, 1)]
    what = "check that rank 1 and rank 2 on near have processor cores of their own; use larger micro-batches or fewer "
    assert report.verdict.changes[0].what == what + "cuts there"


def test_two_ranks_of_unknown_hosts(tmp_path):
    """The only link there is has none to be compared with, and ranks stand for hosts that are not known."""
    run = made(tmp_path / "run", {(0, 1): 300, (1, 0): 400}, ranks=2, clock=clocks(1000))
    run.ranks = {}
    report = analysed(run)
    assert named(report) == [(1, 0), (0, 1)]
    assert report.verdict.changes[0].what.startswith("check the connection between rank 0 and rank 1;")
    assert "  rank 1 -> rank 0: 400 µs for 64.0 KiB; costs" in render(report)


def test_links_of_a_partition(tmp_path):
    """Of one partition, the links that lead to it are shown."""
    report = analysed(made(tmp_path / "run", SLOW, clock=clocks(2000, 3000)), partition=1)
    assert [(link.source, link.target) for link in report.links] == [(2, 1), (0, 1)]


def test_partitions_of_one_process_have_no_links(tmp_path):
    """Transfers between the devices of one rank are no messages."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    end = run.gpipe(0, lambda phase, i, j: 100)
    run.transfer(0, partition=1, microbatch=0, begin=50, dur=50)
    run.gpipe(1, lambda phase, i, j: 100, at=end)
    assert analysed(run).links == ()
