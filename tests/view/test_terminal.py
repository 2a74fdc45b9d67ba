"""The report in the terminal: what matters first, in any width, in any terminal, whatever layers are called."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight._formatting import percent, time
from pipesight.analysis.analyse import analyse
from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.comparison import compare
from pipesight.analysis.report import Report
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, RECOMPUTE
from pipesight.runs.reading.run import open_run
from pipesight.view.comparison_json import comparison_as_json
from pipesight.view.comparison_text import render_comparison
from pipesight.view.text_layout import Style, bar, beside, columns, shown_width, spark
from pipesight.view.text_report import render
from pipesight.view.text_timeline import Glyphs, draw_step
from support.synthetic import Made

EVEN = {"forward": 100, "recompute": 100, "backward": 200}


def analysed(made: Made) -> Report:
    with open_run(made.write()) as run:
        return analyse(run)


def busy_run(folder: Path, *, slow: float = 1, layers: list[list[str]] | None = None, loading: int = 300) -> Report:
    """Analyse a run with something of everything in it."""
    names = layers or [["embed", "block0"], ["block1"], ["block2"], ["block3", "head"]]
    made = Made(folder, balance=[len(own) for own in names], chunks=4)
    rng = np.random.default_rng(0)
    at = 0
    for step in range(12):
        made.span("dataloader", "fetch", begin=at, dur=loading)
        warm = 3 if step == 0 else 1
        time = lambda phase, i, j, warm=warm: int(EVEN[phase] * warm * (slow if j == 1 else 1) + rng.integers(9))
        at = made.gpipe(step, time, at=at + loading, checkpointed=3, layers=lambda j: names[j])
        made.span("compute", "step", begin=at + 7, dur=120)
        at += 150
    made.stats[0] = [{"iteration": 5, "layer": "block1", "tensor": "activation", "nonfinite": "nan", "nans": 3}]
    return analysed(made)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    return busy_run(tmp_path_factory.mktemp("runs") / "run", slow=1.7)


# All of it.


def test_verdict_comes_first(report):
    """After the name of the run comes what is not finite, if there is any, then the bubble, then what to change."""
    blocks = render(report).split("\n\n")
    assert report.path in blocks[0]
    assert blocks[1].startswith("First non-finite tensor: ")
    assert blocks[2].startswith("The bubble is ")
    assert blocks[3].startswith("What would help")
    assert " ".join(blocks[2].split()) == report.verdict.text


def test_everything_is_there(report):
    """Step time, throughput, bubble, losses, layers, partitions, a drawn step, warm-up, and what is not finite."""
    text = render(report)
    for words in (
        "Step time",
        "steps/s",
        "samples/s",
        "Bubble",
        "Recompute",
        "fill and drain",
        "imbalance",
        "data loading",
        "optimizer",
        "block1",
        "Partitions",
        "Step ",
        "Excluded as warm-up: step 0",
        "First non-finite tensor: activation of layer block1, in iteration 5",
        "idle share of all windows; ",
        " including pauses; ",
        "bubble of the schedule alone, without other losses",
        "(shares of the mean step)",
        "(shares of the mean window",
    ):
        assert words in text, words


def test_lines_fit(report):
    """No line is longer than the terminal is wide."""
    for width in range(60, 221):
        assert max(map(len, render(report, width=width).splitlines())) <= width, width


def test_wide_terminals_are_used(report):
    """In 160 columns, there is more: the drawn step is wider, and layers are beside the losses."""
    lines = render(report, width=160).splitlines()
    assert any("Where the time goes" in line and "layers" in line.lower() for line in lines)
    assert max(map(len, lines)) > 150


def test_colour_only_where_asked_for(report):
    """There are no escape codes without colour; with it, the same text."""
    plain, coloured = render(report), render(report, colour=True)
    assert "\x1b" not in plain
    assert "\x1b" in coloured
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain


def test_ascii(report):
    """Where the terminal has no more, everything is ASCII, and phases are still told apart."""
    text = render(report, ascii=True)
    assert text.isascii()
    assert re.search(r"\|F0.*B3.*R2.*\|", text)


def test_names_cannot_command_the_terminal(tmp_path):
    """Names are text: what would move the cursor or turn text around is not sent to the terminal."""
    evil = "\x1b[2Jgone\u202e\r\n"
    text = render(busy_run(tmp_path / "run", layers=[[evil, "b"], ["c"], ["d"], ["e"]]))
    assert "gone" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)


@pytest.mark.parametrize("ascii", [False, True])
def test_narrow_reports_lose_nothing(report, tmp_path, ascii):
    """In 60 columns, what is too long goes on in the next line, and no number ends early."""
    loaded = replace(report.pipelines[0].rows[0], losses=dict.fromkeys(LOSSES, 5000.0), ranks=(3,), device="cuda:0")
    crowded = replace(report, pipelines=(replace(report.pipelines[0], rows=(loaded,)),), ranks=(3, 4))
    other = busy_run(tmp_path / "other", loading=90_000)
    texts = [render(one, width=60, ascii=ascii) for one in (report, crowded)]
    texts.append(render_comparison(compare(report, other), width=60, ascii=ascii))
    assert max(len(line) for text in texts for line in text.splitlines()) <= 60
    assert " ".join(texts[0].split()).count("p10") == 2
    assert all(name in texts[1] for name in ("fill", "share", "imbal.", "jitter", "transf.", "gaps"))
    assert not (ascii and "?" in "".join(texts))


def test_very_long_names(tmp_path):
    """Layers with names longer than a line do not break the table, and are there as a whole."""
    text = render(busy_run(tmp_path / "run", layers=[["x" * 300, "b"], ["c"], ["d"], ["e"]]))
    assert max(map(len, text.splitlines())) <= 80
    assert len("".join(re.findall("x{2,}", text))) == 300


def test_bars_show_shares(report):
    """The parts that are drawn add up to the mean step that is shown below them."""
    text = render(report)
    block = next(block for block in text.split("\n\n") if block.startswith("Where the time goes"))
    shares = [float(share) for share in re.findall(r"(?m)^  \w.*?([\d.]+)%", block)[:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_many_partitions(tmp_path):
    """Of very many partitions, those that stand still most and least are listed."""
    made = Made(tmp_path / "run", balance=[1] * 70, chunks=2)
    made.gpipe(0, lambda phase, i, j: EVEN[phase] + j)
    text = render(analysed(made))
    assert "54 more" in text
    assert "and 38 more partitions" in text


def test_trace_without_tasks(tmp_path):
    """Without a pipeline, there is a table of names, and why there is no bubble."""
    made = Made(tmp_path / "run")
    made.span("posix", "read", begin=0, dur=1500)
    text = render(analysed(made))
    assert "bubble cannot be computed" in text
    assert re.search(r"posix +read +1 +1.50 ms +100.0%", text)


def test_envelope_is_left_out(tmp_path):
    """The span that PyTorch's profiler puts around all others takes no share; one event is not events."""
    made = Made(tmp_path / "run")
    made.span("cpu_op", "aten::mm", begin=0, dur=1500)
    assert render(analysed(made), width=200).splitlines()[0].endswith(" 1 event")
    made.span("Trace", "PyTorch Profiler (0)", begin=0, dur=10_000)
    text = render(analysed(made))
    assert re.search(r"cpu_op +aten::mm +1 +1.50 ms +100.0%", text)
    assert "PyTorch Profiler" not in text


def test_remarks_are_shown(tmp_path):
    """What was left out of the files, and why, is said."""
    made = Made(tmp_path / "run", left_out={"steps": 90, "events": 0, "log_lines": 1})
    made.gpipe(0, lambda phase, i, j: EVEN[phase])
    text = render(analysed(made))
    assert "90 steps were not recorded" in text
    assert "1 log line was not recorded" in text


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("RuntimeError: no\nmore of it", "The run ended with RuntimeError: no."),
        (None, "The run has not ended or was killed; this is as far as it got."),
        ("ok", ""),
    ],
)
def test_ending_is_part_of_the_verdict(tmp_path, outcome, words):
    """That a run failed, or was killed, is said among the first lines, once; that all went well is not."""
    made = Made(tmp_path / "run", outcome=outcome)
    made.gpipe(0, lambda phase, i, j: EVEN[phase])
    text = render(analysed(made))
    verdict = " ".join(text.split("\n\n")[1].split())
    assert verdict.endswith(words)
    assert " ".join(text.split()).count("The run ") == bool(words)


@pytest.mark.parametrize("gone", [True, False])
def test_a_killed_run_is_called_so(tmp_path, gone):
    """Where the process of a run is gone from this machine and left no outcome, it was killed; else nobody knows."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        if gone:
            process.kill()
            process.wait()
        made = Made(tmp_path / "run", outcome=None, ended=None, pid=process.pid, host=os.uname().nodename)
        made.gpipe(0, lambda phase, i, j: EVEN[phase])
        killed = "The run has ended: it was killed, or its machine went down. This is as far as it got."
        assert analysed(made).verdict.text.endswith(killed) == gone
    finally:
        process.kill()
        process.wait()


def test_ending_without_a_pipeline(tmp_path):
    """Of a trace without tasks it is said too."""
    made = Made(tmp_path / "run", outcome="SIGTERM")
    made.span("posix", "read", begin=0, dur=1500)
    assert analysed(made).verdict.text.endswith("micro-batch. The run ended with SIGTERM.")


def test_mini_batches_without_an_optimizer(tmp_path):
    """Where no optimizer stepped, all mini-batches are one step; a remark says so, and how to tell steps."""
    made = Made(tmp_path / "run")
    for minibatch in range(3):
        for phase, begin in (("forward", 0), ("backward", 500)):
            for i, j in np.ndindex(2, 2):
                at = 2000 * minibatch + begin + 100 * (i + j)
                made.task(0, partition=j, microbatch=i, phase=phase, begin=at, dur=100, minibatch=minibatch)
    words = "no optimizer step was seen, so all 3 mini-batches count as one step"
    assert words in " ".join(render(analysed(made)).split())
    assert "run.step(number)" in render(analysed(made))
    assert "Step 0, mini-batch 1 of 3, window 800 " in render(analysed(made))
    made.span("compute", "step", begin=5900, dur=10)
    assert words not in " ".join(render(analysed(made)).split())


def test_changes_say_what_they_are_worth(tmp_path):
    """A gain that was simulated is told from one that is the most there is to gain."""
    text = render(busy_run(tmp_path / "run", slow=1.7, loading=900))
    assert re.search(r"(?m)^  simulated +.\d+%  ", text)
    assert re.search(r"(?m)^  at most +.\d+%  load data in the background", text)


def test_head_wraps(report, tmp_path):
    """What does not fit into the first lines goes on in the next; nothing is dropped."""
    head = render(report, width=60).split("\n\n")[0]
    assert " ".join(head.split()).endswith("checkpoint never, batch 32")
    made = Made(tmp_path / ("long-name-" * 12) / "run")
    made.gpipe(0, lambda phase, i, j: EVEN[phase])
    long = analysed(made)
    lines = render(long, width=60).split("\n\n")[0].splitlines()
    assert "".join(lines).startswith(long.path + "1 step, 8 events")
    assert max(map(len, lines)) <= 60


def test_warm_up_wraps(tmp_path):
    """The steps of a long warm-up go on in the next line."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=1)
    at = 0
    for step in range(200):
        at = made.gpipe(step, lambda phase, i, j, slow=step < 10: EVEN[phase] * (3 if slow else 1), at=at)
    text = " ".join(render(analysed(made)).split())
    assert "Excluded as warm-up: steps 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, much slower than the rest." in text


def test_phases_that_never_ran(tmp_path):
    """A layer without a backward has a dash for it, not a time."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=1)
    made.task(0, partition=0, microbatch=0, phase="forward", begin=0, dur=50, layers={"l0": 50})
    made.task(0, partition=1, microbatch=0, phase="forward", begin=50, dur=50, layers={"l1": 50})
    made.task(0, partition=1, microbatch=0, phase="backward", begin=100, dur=90, layers={"l1": 90})
    made.task(0, partition=0, microbatch=0, phase="backward", begin=190, dur=1)
    text = render(analysed(made))
    assert re.search(r"l0 +0 +50.0 µs +- ", text)
    assert "0.00 µs" not in text


# A step, drawn.


@pytest.fixture
def drawn(tmp_path) -> Report:
    made = Made(tmp_path / "run", balance=[1, 1], chunks=2)
    made.gpipe(0, lambda phase, i, j: EVEN[phase], checkpointed=1)
    return analysed(made)


def test_step_is_drawn(drawn):
    """A block is as long as its task, with its phase, and its micro-batch; dots are the bubble."""
    timeline = draw_step(drawn, 0, width=41)
    assert timeline.end - timeline.begin == 1000
    assert timeline.lines[0] == "F0━━F1━━············B1══════R0╌╌B0══════"
    assert timeline.lines[1] == "····F0━━F1━━B1══════R0╌╌B0══════········"
    assert timeline.bubbles == pytest.approx((0.3, 0.3))


def test_phases_are_distinct(drawn):
    """Forward, recompute and backward differ without colour: in their letter, and in how they are filled."""
    for glyphs in (Glyphs(), Glyphs.ascii()):
        timeline = draw_step(drawn, 0, width=81, glyphs=glyphs)
        for line, phases in zip(timeline.lines, timeline.phases, strict=True):
            for character, phase in zip(line, phases, strict=True):
                allowed = {-1: glyphs.idle, FORWARD: "F", RECOMPUTE: "R", BACKWARD: "B"}[phase]
                assert character in allowed + (glyphs.fill[phase] + "0123456789" if phase >= 0 else "")


def test_parts_of_the_drawn_step(drawn):
    """Below the drawn step, it says where the time of that step went."""
    text = " ".join(render(drawn, step=0).split())
    assert "The whole step takes 1.00 ms: computing 70.0%, fill and drain 30.0%." in text


def test_every_step_is_drawn(report):
    """The time and the bubble of each step that counts are a column each."""
    lines = render(report).splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("Each step"))
    assert [len(re.search("[▁-█]+", line)[0]) for line in lines[at : at + 2]] == [11, 11]


def test_other_step_can_be_drawn(drawn):
    """A step that was not recorded is an error that says which were."""
    assert "Step 0" in render(drawn, step=0)
    with pytest.raises(ValueError, match=r"no tasks of step 7 were recorded \(recorded: 0 to 0\)"):
        render(drawn, step=7)


# Two runs.


def test_comparison_names_the_loss(tmp_path):
    """Of two runs, the loss that makes one slower is named."""
    fast = busy_run(tmp_path / "fast")
    slow = busy_run(tmp_path / "slow", loading=1400)  # that of the first of 11 steps was before it
    found = compare(fast, slow)
    assert "takes 37.5% more time per step: +1.10 ms in the median step." in found.text
    assert "In the mean step, most of that is data loading (+1.00 ms)" in found.text
    assert found.parts["data_loading"].change == pytest.approx(1000)
    text = render_comparison(found)
    assert re.search(r"data loading +273 µs +1.27 ms +\+1.00 ms \(\+366.7%\)", text)
    assert max(map(len, text.splitlines())) <= 80
    assert "less time per step" in compare(slow, fast).text


@pytest.mark.parametrize(
    ("pause", "words"),
    [
        (0, "In the mean step, most of that is computing (-800 µs)"),
        (6 * 1000, "The mean step takes the same time: some steps took much longer than others."),
        (6 * 3000, "The mean step changed by +2.00 ms, and most of that is between steps (+3.00 ms)"),
    ],
)
def test_comparison_of_means(tmp_path, pause, words):
    """What is said of parts adds up to the step they are parts of, which is not the median one if some take long."""

    def of_tasks(folder: Path, task: int, pause: int) -> Report:
        made = Made(folder, balance=[1, 1], chunks=4)
        at = 0
        for step in range(6):
            at = made.gpipe(step, lambda *_: task, at=at) + (pause if step == 2 else 0)
        return analysed(made)

    found = compare(of_tasks(tmp_path / "a", 200, 0), of_tasks(tmp_path / "b", 100, pause))
    assert found.text.startswith(f"The second run takes 50.0% less time per step: -1.00 ms in the median step. {words}")
    mean = [sum(getattr(part, run) for part in found.parts.values()) for run in ("first", "second")]
    assert mean == pytest.approx([2000, 1000 + pause / 6], rel=1e-3)
    assert re.search(r"step time, mean +2.00 ms", render_comparison(found))


def test_comparison_names_settings_that_differ(tmp_path):
    """What was set otherwise is named in one line and in JSON; what one run does not tell, or has alike, is not."""

    def of_settings(name: str, balance: list[int], chunks: int, stats: str | None, **facts: Any) -> Report:
        made = Made(tmp_path / name, balance=balance, chunks=chunks, observed={"stats": stats})
        made.pipeline = {"batch_size": 16, **facts}
        made.gpipe(1, lambda *_: 100, at=made.gpipe(0, lambda *_: 100))
        return analysed(made)

    one = of_settings("a", [2, 1], 4, None, checkpoint="always", devices=["cuda:0", "cuda:1"])
    other = of_settings("b", [1, 1, 1], 2, "my.yaml", checkpoint="never", devices=["cpu"] * 3)
    found = compare(one, other)
    line = "partitions 2 -> 3, balance [2, 1] -> [1, 1, 1], devices [cuda:0, cuda:1] -> [cpu], chunks 4 -> 2, "
    line = f"Different settings: {line}checkpoint always -> never, stats none -> my.yaml"
    assert line in render_comparison(found, width=140).replace("\n  ", "")
    assert "samples" not in found.text
    larger = of_settings("c", [2, 1], 4, None, batch_size=32)
    assert compare(one, larger).text.endswith("Steps have 32 samples instead of 16.")
    assert comparison_as_json(found)["settings"] == {
        "partitions": {"first": 2, "second": 3},
        "balance": {"first": [2, 1], "second": [1, 1, 1]},
        "devices": {"first": ["cuda:0", "cuda:1"], "second": ["cpu"]},
        "chunks": {"first": 4, "second": 2},
        "checkpoint": {"first": "always", "second": "never"},
        "stats": {"first": "none", "second": "my.yaml"},
    }


def test_comparison_with_itself(report):
    """A run is like itself."""
    found = compare(report, report)
    assert "\nThe recorded settings are the same" in render_comparison(found)
    assert "the same time" in found.text
    assert "spent in the same way" in found.text
    assert all(difference.change == 0 for difference in found.parts.values())


def of_speed(folder: Path, speed: dict[str, float], *, width: int = 1000, **shape: Any) -> Report:
    """Analyse a run of two partitions, each of whose layers takes so many times 100 µs forward and 200 backward."""
    partitions = [list(speed)[:2], list(speed)[2:]]
    made = Made(folder, balance=[2, 2], chunks=shape.pop("chunks", 4))
    facts = {"class": "Linear", "parameter_bytes": width, "output_bytes": 64}
    layers = [{"name": name, "partition": j, **facts} for j, names in enumerate(partitions) for name in names]
    made.pipeline = {"layers": layers, **shape}
    at = 0
    for step in range(3):
        for phase in ("forward", "backward"):
            for i in range(made.chunks):
                for j, names in enumerate(partitions):
                    own = {name: int(EVEN[phase] * speed[name]) for name in names}
                    took = sum(own.values())
                    made.task(step, partition=j, microbatch=i, phase=phase, begin=at, dur=took, layers=own)
                    at += took
    return analysed(made)


EVENLY = dict.fromkeys(("a", "b", "c", "d"), 1.0)


@pytest.mark.parametrize(
    ("second", "shape", "words"),
    [
        (dict.fromkeys(EVENLY, 1.12), {}, "The same 4 layers took 12% more time"),
        (dict.fromkeys(EVENLY, 0.9), {}, "The same 4 layers took 10% less"),
        ({**EVENLY, "a": 1.3, "b": 1.2, "c": 1.1, "d": 1.1}, {}, "took 18% more time"),
        ({**EVENLY, "a": 1.5}, {}, None),  # one layer is slower, the machine is not
        (dict.fromkeys(EVENLY, 1.02), {}, None),  # too little to tell
        ({**dict.fromkeys(EVENLY, 1.2), "d": 0.9}, {}, None),
        (dict.fromkeys(EVENLY, 1.2), {"batch_size": 64}, None),  # larger micro-batches have more to do
        (dict.fromkeys(EVENLY, 1.2), {"width": 4000}, None),  # and so have larger layers
        (dict.fromkeys(EVENLY, 1.2), {"chunks": 8, "batch_size": 64}, None),  # outputs are smaller
        (dict.fromkeys(EVENLY, 1.2), {"batch_size": None}, None),
    ],
)
def test_comparison_tells_of_the_machine(tmp_path, second, shape, words):
    """If layers with the same work all take longer, or all less, that is no gain of what was changed."""
    reports = of_speed(tmp_path / "a", EVENLY), of_speed(tmp_path / "b", second, **shape)
    text = compare(*reports).text
    if words is None:
        assert "machine" not in text
    else:
        assert words in text
        assert "the machine itself was" in text
        assert "micro-batches differ" not in text
        assert re.search(r"same layers, micro-batch +1.20 ms", render_comparison(compare(*reports)))


def test_comparison_of_unknown_micro_batches(tmp_path):
    """Where nobody knows how many samples a micro-batch has, they may be the reason."""
    slower = dict.fromkeys(EVENLY, 1.2)
    reports = of_speed(tmp_path / "a", EVENLY, batch_size=None), of_speed(tmp_path / "b", slower, batch_size=None)
    assert compare(*reports).text.endswith(
        "or the micro-batches differ, so this is not due to the balance or the schedule."
    )


def test_comparison_needs_steps(report, tmp_path):
    """A run without a complete step cannot be compared."""
    made = Made(tmp_path / "run")
    made.span("posix", "read", begin=0, dur=1)
    with pytest.raises(ValueError, match="no complete step"):
        compare(report, analysed(made))


# Numbers.


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0, "0.00 µs"), (1.234, "1.23 µs"), (999, "999 µs"), (999.6, "1.00 ms"), (12345, "12.3 ms"), (9.9996e6, "10.0 s")],
)
def test_times(microseconds, text):
    """Times have three digits and a unit."""
    assert time(microseconds) == text


@given(st.floats(0, 1), st.integers(1, 60))
def test_bars_are_as_long_as_shares(share, width):
    """A bar is no longer than its room, and as long as its share of it."""
    drawn = bar(share, width)
    assert abs(len(drawn) - share * width) <= 1
    assert len(bar(share, width, ascii=True)) <= width


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200), st.integers(1, 80))
def test_columns_are_as_high_as_values(values, width):
    """Every value has a column, or shares one with its neighbours, of which the highest shows."""
    drawn = spark(values, width, top=100)
    assert len(drawn) == min(len(values), width)
    assert drawn.count("█") <= sum(value > 87.5 for value in values)
    if max(values) > 87.5:
        assert "█" in drawn


def test_missing_values_are_blank():
    """A step without a value is blank, not as low as the lowest."""
    assert spark([None, 1, 2, None, None, None], 6, top=2) == " ▄█   "
    assert spark([None, 1, None, None], 2, top=1) == "█ "


def test_columns_align():
    """Cells are aligned by what is seen of them, not by escape codes."""
    red = Style(colour=True).paint("ab", "red")
    lines = columns([["x", red], ["long", "abcd"]], align="lr")
    assert [shown_width(line) for line in lines] == [10, 10]


def test_blocks_that_do_not_fit_go_below():
    """Two blocks are beside each other only where there is room."""
    assert beside(["aa"], ["bb"], width=8, gap=4) == ["aa    bb"]
    assert beside(["aa"], ["bb"], width=7, gap=4) == ["aa", "", "bb"]


def test_percent_of_nothing_is_a_dash():
    """What is not there is not shown as a number."""
    assert (percent(0), percent(0.0004), percent(0.0123)) == ("-", "-", "1.2%")


@pytest.mark.parametrize("width", [40, 80])
def test_narrow_terminals_lose_no_text(tmp_path, width):
    """What a wide terminal shows is there in a narrow one, also long names, and no line is too long."""
    names = [f"encoder.layers.{j}.attention.output" for j in range(3)]
    made = Made(tmp_path / "run", balance=[1] * 3, chunks=3)
    made.pipeline = {"devices": ["cpu"] * 3}
    for step in range(6):
        at, times = step * 9000, {"forward": 100 + step, "backward": 300}
        made.gpipe(step, lambda phase, i, j, times=times: times[phase], at=at, layers=lambda j: [names[j]])
        made.span("mine", "a span with a name that is rather long", begin=at + 5000, dur=800)
        made.span("compute", "step", begin=at + 6000, dur=900)
    report = analysed(made)
    lines = render(report, width=width).splitlines()
    assert max(map(len, lines)) <= width
    wide = [line for line in render(report, width=108).splitlines()[1:] if "\u2502" not in line]  # but the path
    shown = Counter(re.findall(r"[\w.:%-]{3,}", "\n".join(line for line in lines if "\u2502" not in line)))
    assert not Counter(re.findall(r"[\w.:%-]{3,}", "\n".join(wide))) - shown - Counter(_SHORTER)
    assert all(any(name in line for line in lines) for name in names)


_SHORTER = {"sharing": 9, "imbalance": 9, "transfer": 9, "host": 9, "gap": 9}  # headings of the table of partitions


def test_every_loss_fits(tmp_path):
    """Partitions that lose time in every way, on several ranks, still fit into 80 columns."""
    made = Made(tmp_path / "run", balance=[1, 1, 1], chunks=3)
    rng = np.random.default_rng(1)
    for rank in range(2):
        for step in range(5):
            at, places = step * 9000, [(j, i) for i in range(3) for j in range(3)]
            tasks = [("forward", *place) for place in places] + [("backward", *place) for place in places[::-1]]
            for phase, j, i in tasks:
                dur = int(EVEN[phase] * (1 + j) * rng.uniform(0.5, 2))
                made.transfer(step, partition=j, microbatch=i, begin=at - 20, dur=20, rank=rank)
                made.task(step, partition=j, microbatch=i, phase=phase, begin=at, dur=dur, rank=rank, device="cuda:0")
                at += dur + 30
    made.description["pipelines"] = [{"partitions": 3, "chunks": 3, "devices": ["cuda:0", "cuda:0", "cuda:1"]}]
    text = render(analysed(made))
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"partition +device +rank +busy +bubble +fill +share +imbal. +jitter\n", text)
    assert re.search(r"partition +transf. +gaps\n", text)  # below, as there is no room beside


def test_folding_leaves_no_colour_open():
    """A line that is broken has all of its text, and no colour, which would go on into the next line."""
    style = Style(width=60, colour=True)
    short, long = style.paint("c" * 60, "red"), style.paint("a" * 50, "red") + style.paint("b" * 50, "green")
    assert style.folded(short) == [short]
    assert [line.strip() for line in style.folded(long)] == ["a" * 50 + "b" * 10, "b" * 40]
