"""Comparisons of programs without a pipeline, and of more than two runs: in the terminal, as JSON, on the page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.comparison import compare
from pipesight.analysis.memory import DeviceMemory, MemoryReport
from pipesight.runs.reading.run import open_run
from pipesight.view.comparison_json import comparison_as_json
from pipesight.view.comparison_text import render_comparison
from pipesight.view.payload.comparison_payload import comparison_payload
from support.schemas import validated
from support.synthetic import START, Made


def program(path, *, loading, steps=6, mine=0, losses=()):
    """Make a run of a program: each step loads, computes for 500 backward and 100 in its optimizer, and has a span."""
    made = Made(path, pipelines=[])
    for number in range(steps):
        at, known = number * (loading + mine + 600), {"step": number}
        made.span("dataloader", "fetch", begin=at, dur=loading, **known)
        if mine:
            made.span("mine", "metrics", begin=at + loading, dur=mine)
        made.span("compute", "backward", begin=at + loading + mine, dur=500, module="Net", depth=0, **known)
        made.span("compute", "step", begin=at + loading + mine + 500, dur=100, **known)
        for loss in losses[number : number + 1]:
            line = {
                "id": 0,
                "name": "loss",
                "cat": "counter",
                "pid": 4000,
                "tid": 4000,
                "ts": START + at + 1,
                "ph": "C",
            }
            made.events.setdefault(0, []).append({**line, "args": {"loss": loss}, "point": {"loss": loss}})
    with open_run(made.write()) as opened:
        return analyse(opened)


@pytest.fixture
def runs(tmp_path):
    return [
        program(tmp_path / "a", loading=400, losses=(4.0, 3.0, 2.0)),
        program(tmp_path / "b", loading=900, steps=4, losses=(4.0, 1.0)),
        program(tmp_path / "c", loading=100, mine=200),
    ]


def test_programs(runs):
    """Step time, throughput and parts of programs are compared; what one run does not have takes no time there."""
    found = compare(runs[0], runs[2])
    assert (found.quantities["step_time"].first, found.quantities["step_time"].second) == (1000, 900)
    assert {name: part.change for name, part in found.parts.items() if part.change} == {
        "data_loading": -300,
        "own:metrics": 200,
    }
    assert found.text == (
        "The second run takes 10.0% less time per step: -100 µs in the median step. In the mean step, most of that is "
        "data loading (-300 µs)."
    )


def with_memory(report, peaks, weights):
    """Give a report the peaks of devices; all but weights are activations."""
    parts = {"weights": weights, "gradients": 0, "optimizer_state": 0, "inputs": 0}
    devices = [
        DeviceMemory(
            0, f"cuda:{k}", peak, 1, {**parts, "activations": peak - weights}, peak, peak + 100, 1 << 30, None, 0
        )
        for k, peak in enumerate(peaks)
    ]
    return replace(report, memory=MemoryReport((1,), (), tuple(devices), (), ()))


def test_memory(runs):
    """Peaks of devices are compared: of the fullest, what it is made of, and of each; not with a run without them."""
    a = with_memory(runs[0], [3 << 20, 1 << 20], 1 << 20)
    b = with_memory(runs[1], [2 << 20, 4 << 20], 1 << 20)
    found = validated("comparison", comparison_as_json(compare(a, b), compare(a, a)))
    changes = {name: entry["change"] for name, entry in found["memory"].items() if entry["change"]}
    megabyte = 1 << 20
    assert changes == {
        "peak": megabyte,
        "activations": megabyte,
        "allocated": megabyte,
        "rank 0, cuda:0": -megabyte,
        "rank 0, cuda:1": 3 * megabyte,
    }
    assert all(entry["change"] == 0 for entry in found["more"][0]["memory"].values())
    lines = render_comparison(compare(a, b)).splitlines()
    (line,) = [line for line in lines if line.startswith("memory, fullest device")]
    assert line.split()[-5:] == ["3.00", "MiB", "4.00", "MiB", "+33.3%"]
    assert "3.00 MiB" in render_comparison(compare(a, b), compare(a, a), width=160)
    assert compare(a, runs[2]).memory == {}
    assert "fullest device" not in render_comparison(compare(a, b), compare(a, runs[2]))


def test_curves_have_the_steps_of_all_runs(runs):
    """Curves of runs of unlike length are laid over each other by step; JSON has them all."""
    pairs = [compare(runs[0], other) for other in runs[1:]]
    value = validated("comparison", comparison_as_json(*pairs))
    (further,) = value["more"]
    curves = {curve["name"]: curve for curve in value["curves"]}
    assert curves["loss"] == {"name": "loss", "steps": [0, 1, 2], "first": [4, 3, 2], "second": [4, 1, None]}
    assert curves["step time"]["second"] == [1500, 1500, 1500, None, None]  # the end of the last is not known
    assert [curve["second"] for curve in further["curves"] if curve["name"] == "loss"] == [[None] * 3]


def test_layers_of_several(tmp_path):
    """Layers that changed in any run are listed, with their times in all; one that is missing takes no time."""
    reports = []
    for name, times in (("a", {"fc": 100, "head": 50}), ("b", {"fc": 100, "head": 80}), ("c", {"fc": 300})):
        made = Made(tmp_path / name, pipelines=[])
        for number in range(6):
            at = number * 1_000
            made.span("compute", "forward", begin=at, dur=400, module="Net", depth=0, step=number)
            for layer, dur in times.items():
                made.span("compute", "forward", begin=at, dur=dur, module="Linear", layer=layer, depth=1, step=number)
                at += dur
            made.span("compute", "step", begin=number * 1_000 + 900, dur=50, step=number)
        with open_run(made.write()) as opened:
            reports.append(analyse(opened))
    pairs = [compare(reports[0], other) for other in reports[1:]]
    rows = comparison_payload(*pairs)["layers"]["rows"]
    assert rows[0] == ["fc", "100 µs", "100 µs", "300 µs +200.0%"]
    assert rows[2] == ["head", "50.0 µs", "80.0 µs +60.0%", "-"]
    text = " ".join(render_comparison(*pairs, width=120).split())
    assert "layers that changed fc 100 µs 100 µs 300 µs +200.0% Net" in text
    assert "head 50.0 µs 80.0 µs +60.0% -" in text


@pytest.mark.parametrize("width", [40, 80, 160])
def test_table_of_several(runs, width):
    """Each run has a column with its difference to the first; where columns do not fit, rows take several lines."""
    text = render_comparison(*(compare(runs[0], other) for other in runs[1:]), width=width)
    assert max(map(len, text.splitlines())) <= width
    flat = re.sub(r"\s*\|?\s+(?:[A-C] )?", " ", text)  # cells are below the name where they do not fit beside it
    assert "data loading 400 µs 900 µs +125.0% 100 µs -75.0%" in flat
    assert "metrics - - 200 µs" in flat
    assert "layers that changed" not in flat  # Net takes the same time in all
    assert re.search(r"A \S+ +4 -> 2\n  B \S+ +4 -> 1\n", text)
    assert text.startswith("B takes 50.0% more time per step")
