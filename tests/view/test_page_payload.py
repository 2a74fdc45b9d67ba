"""What goes into the page: which steps, how much of them, and that it stays small."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse
from pipesight.runs.reading.run import LogLine, open_run
from pipesight.view import page as html
from pipesight.view import page_assets
from pipesight.view.page import MOST_BYTES, Limits, Served, page_html, page_payload, write_page
from pipesight.view.payload.log_lines import logs_of
from pipesight.view.payload.statistic_tables import Mark, statistics_of
from pipesight.view.payload.step_choice import choose_steps
from support.synthetic import Made

TIMES = {"forward": 100, "recompute": 100, "backward": 200}


def payload_of(folder, **limits):
    with open_run(folder) as run:
        return page_payload(run, analyse(run), limits=Limits(**limits))


def unpacked(page):
    packed = re.search(r'id="payload">([^<]*)<', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def made(folder, *, steps=6, balance=(1, 1), chunks=2, layers=None, **description):
    run = Made(folder, balance=balance, chunks=chunks, **description)
    at = 0
    for step in range(steps):
        at = 100 + run.gpipe(step, lambda phase, i, j: TIMES[phase] + i, at=at, checkpointed=1, layers=layers)
    return run


# Steps.


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 40), st.integers(1, 400))
def test_steps_that_matter_are_chosen_first(times, size, most):
    """The median, the last, the slowest and the first step are shown before any other, and never more than fit."""
    chosen = choose_steps(times, [size] * len(times), most=most)
    assert len(chosen) == len({*chosen}) == max(1, min(len(times), most // size))
    assert {*chosen} <= {*range(len(times))}
    distance = [abs(time - np.median(times)) for time in times]
    assert distance[chosen[0]] == min(distance)
    if len(chosen) >= 4:
        assert {0, len(times) - 1} <= {*chosen[:4]}
        assert max(times) in [times[place] for place in chosen[:4]]


def test_a_step_is_shown_however_large(tmp_path):
    """Its earliest blocks are, at least."""
    payload = payload_of(made(tmp_path / "run", chunks=8).write(), blocks=10)
    assert len(payload["shown"]) == 1
    assert len(payload["shown"][0]["tasks"]["lane"]) == 10
    assert "shows 1 of 6 steps" in payload["notes"][0]


def test_columns_hold_every_time(tmp_path):
    """Begins are differences within a step; with them and the times, every task is where it was."""
    run = made(tmp_path / "run", layers=lambda j: [f"a{j}", f"b{j}"])
    payload = payload_of(run.write())
    assert [step["number"] for step in payload["shown"]] == list(range(6))
    with open_run(run.folder) as opened:
        tasks = opened.tasks(range(3, 4))
    step = payload["shown"][3]
    begin = np.cumsum(step["tasks"]["begin"])
    assert sorted(begin + tasks.begin.min()) == sorted(tasks.begin)
    assert sorted(step["tasks"]["time"]) == sorted(tasks.end - tasks.begin)
    assert sum(step["layers"]["count"]) == len(step["layers"]["layer"]) == 2 * len(tasks)
    names = [payload["layers"][k]["name"] for k in step["layers"]["layer"]]
    first = step["tasks"]["lane"][0]
    assert names[: step["layers"]["count"][0]] == [f"a{first}", f"b{first}"]
    assert step["layers"]["begin"][:2] == [0, step["layers"]["time"][0]]


def test_layers_are_there_for_as_many_steps_as_fit(tmp_path):
    """The others say that they have none, and so does a note."""
    run = made(tmp_path / "run", layers=lambda j: [f"a{j}"])
    payload = payload_of(run.write(), layer_runs=25)
    with_layers = [step["number"] for step in payload["shown"] if step["layers"] is not None]
    assert len(with_layers) == 2
    assert payload["shown"][payload["start"]]["number"] in with_layers
    assert any("for 2 of these steps" in note for note in payload["notes"])


def test_lanes_beyond_the_limit_are_left_out(tmp_path):
    """A run of many ranks shows the first of them, and says so."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    for rank in range(4):
        for step in range(2):
            run.gpipe(step, lambda phase, i, j: TIMES[phase], at=step * 5000, rank=rank)
    payload = payload_of(run.write(), lanes=5)
    assert [(lane["rank"], lane["partition"]) for lane in payload["lanes"]] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert {*payload["shown"][0]["tasks"]["lane"]} == {0, 1, 2, 3, 4}
    assert any("5 of 8 lanes" in note for note in payload["notes"])


def test_evaluations_lie_in_the_step_during_which_they_ran(tmp_path):
    """They are drawn, but their windows are no part of the bubble of lanes."""
    run = Made(tmp_path / "run", balance=[1], chunks=1)
    for step, at in enumerate((0, 1000, 2000)):
        run.task(step, partition=0, microbatch=0, phase="forward", begin=at, dur=100, minibatch=2 * step + 1)
        run.task(step, partition=0, microbatch=0, phase="backward", begin=at + 100, dur=100, minibatch=2 * step + 1)
    run.task(1, partition=0, microbatch=0, phase="forward", begin=1500, dur=50, minibatch=4)
    step = payload_of(run.write())["shown"][1]
    assert np.cumsum(step["tasks"]["begin"]).tolist() == [0, 100, 500]
    assert step["lane_bubbles"] == [0]
    assert len(step["windows"]) == 2


def test_the_last_step_of_a_killed_run_has_no_bubble(tmp_path):
    """Its tasks are drawn as far as they go."""
    run = made(tmp_path / "run")
    run.task(6, partition=0, microbatch=0, phase="forward", begin=10_000, dur=100)
    last = payload_of(run.write(end=False))["shown"][-1]
    assert last["number"] == 6
    assert last["bubble"] is None
    assert last["lane_bubbles"] == [None, None]


def test_how_it_ended_and_what_one_step_is(tmp_path):
    """The verdict, on top, says that a run failed; a note, that no optimizer told steps apart."""
    run = made(tmp_path / "run", steps=1, outcome="SIGTERM")
    for i, j in np.ndindex(2, 2):
        run.task(0, partition=j, microbatch=i, phase="forward", begin=9000 + 100 * (i + j), dur=100, minibatch=2)
        run.task(0, partition=j, microbatch=i, phase="backward", begin=9500 + 100 * (i + j), dur=100, minibatch=2)
    payload = payload_of(run.write())
    assert payload["verdict"]["text"].endswith("The run ended with SIGTERM.")
    (left_out,) = payload["findings"]
    assert [
        text for text, _ in left_out["entries"] if text.startswith("no optimizer step was seen, so all 2 mini-batches")
    ]


GONE = {"pid": 2**30, "host": os.uname().nodename, "ended": None, "outcome": None}
TERMINATED = {**GONE, "ended": "2024-01-01T00:00:00+00:00", "outcome": "SIGTERM"}
KILLED = "The run has ended: {} killed, or {} machine went down; the others were then ended with SIGTERM."


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([TERMINATED, GONE, TERMINATED], KILLED.format("rank 1 was", "its")),
        ([GONE, TERMINATED, TERMINATED], KILLED.format("rank 0 was", "its")),
        ([TERMINATED, GONE, GONE], KILLED.format("ranks 1 and 2 were", "their")),
        ([TERMINATED, {**GONE, "host": "elsewhere"}, TERMINATED], KILLED.format("rank 1 was", "its")),
        ([TERMINATED, {**GONE, "pid": os.getpid()}, TERMINATED], "The run ended with SIGTERM."),  # it may still say
        ([TERMINATED, {**GONE, "launch": "job_1"}, TERMINATED], "The run ended with SIGTERM."),  # of an earlier run
        ([TERMINATED, TERMINATED, TERMINATED], "The run ended with SIGTERM."),
        (
            [TERMINATED, {**TERMINATED, "outcome": "ValueError: no.\nmore"}, TERMINATED],
            "The run has ended: rank 1 ended with ValueError: no; others were then ended with SIGTERM.",
        ),
        ([{**TERMINATED, "outcome": "KeyError: 1"}, GONE, TERMINATED], "The run ended with KeyError: 1."),
    ],
)
def test_the_rank_that_ended_the_run_is_named(tmp_path, ends, said):
    """SIGTERM is what torchrun ends the others with, so it is not how the run ended."""
    run = made(tmp_path / "run", steps=1)
    first, *others = ({"rank": rank, "launch": "job_2", **facts} for rank, facts in enumerate(ends))
    run.description.update(first, world_size=3)
    run.ranks = {facts["rank"]: facts for facts in others}
    for rank in run.ranks:
        run.event("POSIX", "read", begin=0, dur=1, rank=rank)
    assert payload_of(run.write())["verdict"]["text"].endswith(said)


def test_phases_that_never_ran_have_no_time(tmp_path):
    """The page has a dash for them, not a time of 0."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=1)
    for k, (phase, j) in enumerate([("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]):
        layers = {} if (phase, j) == ("backward", 0) else {f"l{j}": 100}
        run.task(0, partition=j, microbatch=0, phase=phase, begin=100 * k, dur=100, layers=layers)
    layers = payload_of(run.write())["layers"]
    assert [(layer["forward"], layer["backward"]) for layer in layers] == [(100, None), (100, 100)]


def test_a_trace_without_a_pipeline_has_names(tmp_path):
    """There is no timeline then, but where the time went by name."""
    run = Made(tmp_path / "run")
    run.span("compute", "work", begin=0, dur=70)
    payload = payload_of(run.write())
    assert payload["shown"] == []
    assert payload["names"] == [["compute", "work", 1, 70]]
    assert payload["figures"] is None


# Statistics and log lines.


def line(step, value, layer="a", **more):
    return {"iteration": step, "layer": layer, "tensor": "x", "statistic": "mean", "value": value, **more}


def test_statistics_are_tables_of_layers_and_steps():
    """A row a layer, a column a step; what is missing is null, what is not finite is named."""
    lines = [line(0, 1.0), line(1, 1 / 3), line(1, None, "b", nonfinite="-inf", infs=2), {"value": 1}, line("1", 2)]
    found, marks = statistics_of(lines, most=100)
    assert found["names"] == ["a", "b"]
    assert found["groups"][0]["steps"] == [0, 1]
    assert found["groups"][0]["values"] == [1.0, 0.33333, None, "-inf"]
    assert marks.of_step == {1: {("b", "x", 0): Mark("2 Inf")}}
    json.dumps(found, allow_nan=False)


def test_a_statistic_of_what_is_left_of_a_tensor_is_not_finite():
    """The mean of a tensor's finite elements says what it leaves out; of ranks, the one with NaN or Inf is shown."""
    lines = [line(0, 1 / 3, infs=1), line(1, 2.0, nans=1000, infs=2), line(2, None, nans=1), line(3, float("nan"))]
    lines += [line(4, 1.0), line(4, 2.0, rank=1, infs=1), line(5, 1.0), line(5, 2.0, rank=1), line(6, 1.0, infs=0)]
    found, _ = statistics_of(lines, most=100)
    values = ["0.33333 without 1 Inf", "2 without 1,000 NaN and 2 Inf", "nan", "nan", "2 without 1 Inf", 1.0, 1.0]
    assert found["groups"][0]["values"] == values


@pytest.mark.parametrize(
    ("place", "blocks"),
    [
        ({"partition": 1, "microbatch": 1, "phase": "forward"}, [[1, 0, 1]]),
        ({"partition": 0, "microbatch": 0, "phase": "recompute"}, [[0, 1, 0]]),
        ({"partition": 1}, [[1, None, None]]),
        ({"partition": 1, "microbatch": 7, "phase": "forward"}, [[1, None, None]]),
        ({}, [[None, None, None]]),
    ],
)
def test_what_is_not_finite_is_marked_where_it_was_computed(tmp_path, place, blocks):
    """In the one block that the line of statistics names; without one, in the partition, and else in the step."""
    run = made(tmp_path / "run")
    run.stats[0] = [line(3, 1.0, infs=1, **place)]
    step = next(step for step in payload_of(run.write())["shown"] if step["number"] == 3)
    assert [mark[1:4] for mark in step["nonfinite"]] == blocks


def test_a_micro_batch_of_several_mini_batches_is_not_marked(tmp_path):
    """A step with two mini-batches has two blocks that a line of statistics may mean."""
    run = Made(tmp_path / "run", balance=[1], chunks=1)
    for k in (0, 1):
        run.task(0, partition=0, microbatch=0, phase="forward", begin=200 * k, dur=100, minibatch=k)
        run.task(0, partition=0, microbatch=0, phase="backward", begin=200 * k + 100, dur=100, minibatch=k)
    run.stats[0] = [line(0, 1.0, infs=1, partition=0, microbatch=0, phase="forward")]
    (step,) = payload_of(run.write())["shown"]
    assert len(step["windows"]) == 2
    assert [mark[1:4] for mark in step["nonfinite"]] == [[0, None, None]]


def test_the_bars_of_partitions_are_as_long_as_their_window(tmp_path):
    """What is lost by sharing processors is no time of a phase as well: parts add up, as in JSON."""
    run = Made(tmp_path / "run", balance=[1, 1], chunks=4, devices=["cpu", "cpu"], processors=1)
    alone = {(0, 0), (3, 1)}  # the first and the last task of a phase; others run two at a time, at half the pace
    at = 0
    for step in range(8):
        at = 100 + run.gpipe(step, lambda phase, i, j: TIMES[phase] * (1 if (i, j) in alone else 2), at=at)
    with open_run(run.write()) as opened:
        report = analyse(opened)
        losses = page_payload(opened, report)["losses"]
    (pipeline,) = report.pipelines
    inside = [place for place, part in enumerate(losses["parts"]) if part["kind"] != "outside"]
    assert all(row.losses["sharing"] > 0 for row in pipeline.rows)
    for lane, row in zip(losses["run"]["lanes"], pipeline.rows, strict=True):
        times = [lane["times"][place] for place in inside]
        assert sum(times) == pytest.approx(pipeline.window.mean, abs=len(times))
        assert sum(times[:4]) == pytest.approx(row.busy, abs=4)


def test_statistics_are_thinned_but_keep_what_is_not_finite():
    """Every third step is left, the last, and those with a NaN."""
    lines = [line(step, float(step)) for step in range(30)]
    lines[7] = line(7, None, nonfinite="nan", nans=1)
    found, _ = statistics_of(lines, most=10)
    assert found["groups"][0]["steps"] == [0, 3, 6, 7, 9, 12, 15, 18, 21, 24, 27, 29]
    assert found["left_out"] == 3


def test_log_lines_of_shown_steps_and_warnings_come_first():
    """The others fill the room that is left; how many were left out is counted."""
    lines = [LogLine(0, 1000 * k, "WARNING" if k == 7 else "INFO", "x", f"{k}", step=k) for k in range(10)]
    found = logs_of(lines, steps=[2, 3], begin=0, most=5)
    assert [entry["text"] for entry in found["lines"]] == ["0", "1", "2", "3", "7"]
    assert found["left_out"] == 5


# The file.


@pytest.mark.slow
def test_the_page_of_a_normal_run_is_small(tmp_path):
    """4 partitions, 4 micro-batches, 8 layers, 200 steps, statistics and log lines: under 2 MB, nothing left out."""
    rng = random.Random(0)
    run = Made(tmp_path / "run", balance=[2] * 4, chunks=4)
    at = 0
    for step in range(200):
        time = lambda phase, i, j: int(TIMES[phase] * 8 * rng.uniform(0.8, 1.3))
        at = 900 + run.gpipe(step, time, at=at, checkpointed=3, layers=lambda j: [f"block{2 * j}", f"block{2 * j + 1}"])
        run.span("compute", "step", begin=at - 800, dur=rng.randrange(500, 700))
        for layer in range(8):
            for statistic in ("mean", "std", "min", "max"):
                run.stat(f"block{layer}", "activation", statistic, step, rng.gauss(0, 1))
        for j in range(4):
            run.log(f"2023-11-14T22:13:20.000000+00:00 INFO train [step {step} partition {j}] {rng.random()}")
    page = write_page(run.write())
    assert page == tmp_path / "run" / "report.html"
    assert page.stat().st_size < MOST_BYTES
    payload = unpacked(page.read_text())
    assert len(payload["shown"]) == 200
    assert all(step["layers"] for step in payload["shown"])
    assert payload["logs"]["left_out"] == 0
    assert not any("of 200 steps" in note for note in payload["notes"])


def test_a_page_that_is_too_large_shows_less(tmp_path, monkeypatch):
    """Half of everything, and half again, until it fits; it says that steps are missing."""
    rng = random.Random(0)
    run = Made(tmp_path / "run", balance=[1] * 4, chunks=8)
    at = 0
    for step in range(60):
        at = run.gpipe(step, lambda phase, i, j: rng.randrange(1, 10**6), at=at)
    folder = run.write()
    bare = len(page_html(None))
    monkeypatch.setattr(html, "LIMITS", Limits(blocks=4000))
    monkeypatch.setattr(html, "MOST_BYTES", bare + 16_000)
    page = write_page(folder)
    assert page.stat().st_size <= bare + 16_000
    payload = unpacked(page.read_text())
    assert 0 < len(payload["shown"]) < 60
    assert f"shows {len(payload['shown'])} of 60 steps" in payload["notes"][0]


def test_the_page_goes_where_it_is_asked_to_go(tmp_path):
    """An output of one's own; nothing else is left behind."""
    folder = made(tmp_path / "run").write()
    before = {*folder.rglob("*")}
    assert write_page(folder, output=tmp_path / "elsewhere.html") == tmp_path / "elsewhere.html"
    assert {*folder.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.html", "run"]


def test_the_payload_is_json_that_every_parser_reads(tmp_path):
    """No NaN, no infinity, and back again as it was."""
    run = made(tmp_path / "run")
    run.stat("a", "x", "mean", 0, float("nan"))
    payload = payload_of(run.write())
    assert json.loads(json.dumps(payload, allow_nan=False)) == payload
    assert unpacked(page_html(payload)) == payload


def test_markup_in_names_never_reaches_the_markup_of_the_page(tmp_path):
    """The payload is base64, the title is escaped."""
    evil = "</script><img src=x onerror=alert(1)>"
    run = made(tmp_path / "<b>&", layers=lambda j: [evil], command=[evil])
    page = page_html(payload_of(run.write()))
    assert "<title>&lt;b&gt;&amp;</title>" in page
    assert evil not in page
    assert page.count("</script>") == 2


def test_the_policy_names_this_script_and_this_style():
    """Whatever else would be run or loaded is not."""
    page = page_html(None)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[\w+/=]{44}'", policy)) == 2


def test_a_served_page_says_where_to_ask():
    """A file asks nobody; a served page its own server, at the addresses that it is given."""
    assert "pipesight-events" not in page_html(None).partition("</head>")[0]
    page = page_html(None, served=Served(events="e", payload="p?x=1&y=2", trace=None))
    head = page.partition("</head>")[0]
    assert '<meta name="pipesight-events" content="e">' in head
    assert '<meta name="pipesight-payload" content="p?x=1&amp;y=2">' in head
    assert "pipesight-trace" not in head
    assert "connect-src 'self'" in head


def test_scripts_that_import_each_other_in_a_circle_are_refused(monkeypatch):
    """They are joined one after the other, so there must be an order."""
    scripts = {"a.js": 'import { b } from "./b.js";\nexport const a = b;\n', "b.js": 'import { a } from "./a.js";\n'}
    monkeypatch.setattr(page_assets, "_asset", scripts.__getitem__)
    with pytest.raises(ImportError, match=r"in a circle: a\.js -> b\.js -> a\.js"):
        page_assets._script.__wrapped__("a.js")
