"""The page of a run over several ranks, in a real browser, against the terminal's report of the same run."""

from __future__ import annotations

import re

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.latest_step import latest_step
from pipesight.runs.reading.run import open_run
from pipesight.schedule.task_orders import interleaved
from pipesight.view.live.watch_screen import Frame, draw_frame
from pipesight.view.page import write_page
from pipesight.view.text_report import render
from support import browser
from support.synthetic import Made

CHUNKS, STEPS = 8, 3
KINDS = ("program", "lane")
TIMES = {"forward": 1000, "backward": 2000}
BUBBLE = 1 / (2 * CHUNKS + 1)  # (p - 1) / (v m + p - 1), with v = 2 partitions on each of p = 2 ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two replicas, each of two ranks on a host of its own; a rank has two partitions, and the schedule's bubble."""
    clock = {"error_ns": 0, "ranks": {str(rank): {"error_ns": 0} for rank in (1, 2, 3)}}
    made = Made(tmp_path_factory.mktemp("ranks") / "run", balance=[1] * 4, chunks=CHUNKS, clock=clock)
    schedule = interleaved(4, CHUNKS, devices=2)
    made.pipeline = {"schedule": schedule.name, "ranks": [[j % 2, 2 + j % 2] for j in range(4)]}
    made.ranks = {rank: {"rank": rank, "host": "here" if rank < 2 else "there"} for rank in (1, 2, 3)}
    at = 0
    for step in range(STEPS):
        end = [made.scheduled(step, schedule, TIMES, at=at, first_rank=first) for first in (0, 2)]
        made.span("compute", "step", begin=end[1] + 100, dur=200, rank=3)
        for rank in range(4):  # they come 10 microseconds after each other, and all leave 30 after the last
            call = {"begin": end[0] + 310 + 10 * rank, "dur": 60 - 10 * rank, "rank": rank, "step": step}
            made.span("comm", "all_gather", **call, group="0,1,2,3", size=3000, **{"async": False})
        at = end[0] + 400
    write_page(made.write())
    return made.folder


@pytest.fixture(scope="module")
def report(run):
    with open_run(run) as opened:
        return analyse(opened)


@pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)
def test_page(run, report, tmp_path):
    """Lanes are named by rank, replica and host; blocks are all there; bubbles are the terminal's, those of ranks."""
    with browser.open_browser(tmp_path / "profile") as page:
        page.open(run / "report.html")
        facts = page.inspect()
        assert facts["blocks"] == facts["drawn"]["blocks"] == 2 * 4 * CHUNKS * 2
        assert [lane["blocks"] for lane in facts["lanes"]] == [CHUNKS * 2] * 8
        hosts = ["here", "here", "there", "there"]
        lanes = [f"rank {r} on {hosts[r]}, partition {j}" for r in range(4) for j in (r % 2, 2 + r % 2)]
        assert [lane["name"] for lane in facts["lanes"]] == lanes
        labels = page.text("#lane-labels")
        assert re.findall(r"rank \d.*", labels) == [
            f"rank {r} \u00b7 replica {r // 2} \u00b7 {hosts[r]}" for r in range(4)
        ]
        assert re.findall(r"exactly (\S+)", labels) == [f"{BUBBLE:.1%}"] * 4
        # What is hatched in a lane are the waits of its rank, and add up to the bubble that the terminal has.
        assert report.overall.bubble == pytest.approx(BUBBLE)
        assert facts["bubble"] == pytest.approx(BUBBLE, abs=1e-6)
        for lane in facts["lanes"]:
            assert lane["bubble"] == pytest.approx(BUBBLE, abs=1e-6)
            assert sum(share for _, _, share in lane["idle"]) == pytest.approx(BUBBLE)
        titles, *rows = (
            [cell.strip() for cell in row.split("\t")] for row in page.text("#traffic table").splitlines()[1:]
        )
        assert [dict(zip(titles, row, strict=True)) for row in rows] == [
            {
                "name": "all_gather",
                "ranks": "0-3",
                "calls": f"{STEPS}",
                "size": "2.93 KiB",
                "time": "30.0 µs",
                "bandwidth": "95.4 MiB/s",
                "in the background": "0.0%",
                "waits for the last": "20.0 µs",
                "came last": "rank 3 in 100.0%",
            }
        ]
        assert "mean of 3 training steps in 2 replicas" in page.text("#time-facts")
        assert "take turns" in page.text("#time")
        page.point(*page.place_of(5, 500))  # rank 2 computes for its other partition
        assert not page.seen("#tooltip")
        page.point(*page.place_of(4, 500))
        assert "rank 2 on there, partition 0" in page.text("#tooltip")
        program, lane = (next(row for row in facts["rows"] if row["rank"] == 3 and row["kind"] == k) for k in KINDS)
        x, y = page.place_of(6, facts["view"]["end"] - 200)  # the optimizer of rank 3, in the row above its lanes
        page.point(x, y - (lane["top"] + lane["height"] * 0.7) + program["top"] + program["height"] / 2)
        assert page.text("#tooltip").split("\n\n")[:2] == ["Optimizer", "rank 3 \u00b7 replica 1 \u00b7 there"]
        page.click("#fold-toggle")  # lanes alone are left, which are found where they are drawn
        folded = page.inspect()
        assert [row["kind"] for row in folded["rows"]] == ["lane"] * 8
        assert folded["rows"][-1]["top"] < lane["top"]
        assert "rank 2, partition 2" in page.text("#lane-labels")
        page.click_at(*page.place_of(7, 40_000))
        assert page.inspect()["selected"]["key"].split("/")[1:3] == ["3", "3"]
        page.resize(390, 800)  # tables that are wider scroll in their own place
        assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.complaints() == []


def test_terminal(report):
    """The drawn step names rank and partition, with the bubble of each rank; a step of several replicas counts once."""
    text = render(report)
    assert re.search(r"2 replicas\n", text)
    assert "median of 3 steps," in text
    rows = re.findall(r"^  (r\d p\d) .*\u2502 *(\S*)$", text, re.MULTILINE)
    assert rows == [("r0 p0", "5.9%"), ("r0 p2", ""), ("r1 p1", "5.9%"), ("r1 p3", "")]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [80, 160])
def test_watched(report, width):
    """So does what is watched."""
    lines = draw_frame(Frame("RUN", "going on", report, latest_step(report)), width=width, height=40)
    rows = [found for line in lines if (found := re.match(r"  (r\d p\d) .*\u2502 *(\S*) *(\S*)$", line))]
    one, none = ("5.9%", "5.9%"), ("", "")
    assert [row[1] for row in rows] == ["r0 p0", "r0 p2", "r1 p1", "r1 p3"]
    assert [row.groups()[1:] for row in rows] == [one, none, one, none]
    assert re.search(r"Bubble +5\.9% +usually 5\.9%", "\n".join(lines))
