"""`pipesight report` on what Megatron-LM prints while it trains."""

import gzip
import math
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipesight.analysis.comparison import compare
from pipesight.cli.command import main
from pipesight.report import NotARunError, analyse, as_json, open_run, render
from pipesight.view.payload.run_payload import page_payload
from support.schemas import validated

BATCH = 32
TIMERS = {"forward-backward": (800.0, 850.0), "forward-compute": (300.0, 400.0), "optimizer": (40.0, 50.5)}


def line(number: int, at: datetime, mean: float, *, loss: float | None = None, nan: int = 0) -> str:
    """Return the line of an iteration; a loss that is not finite is not in it."""
    fields = [
        f" [{at:%Y-%m-%d %H:%M:%S.%f}] iteration {number:8d}/{100:8d}",
        f" consumed samples: {number * BATCH:12d}",
        f" elapsed time per iteration (ms): {mean:.1f}",
        f" learning rate: {number / 1e6:.6E}",
        f" global batch size: {BATCH:5d}",
        *([] if loss is None else [f" lm loss: {loss:.6E}"]),
        f" grad norm: {2 / number:.3f}",
        f" number of nan iterations: {nan:3d}",
    ]
    return " |".join(fields) + " |"


def block(option: str, timers: dict[str, tuple[float, float]]) -> list[str]:
    """Return a block of timers, as an option of Megatron-LM writes it; four ranks, of which the third is slowest."""
    if option == "all":
        rows = ["times across ranks (ms):"]
        for name, (least, most) in timers.items():
            rows.append(f"  {name}:")
            rows += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate((least, least, most, least))]
        return rows
    named = {(name + " ").ljust(48, "."): spread for name, spread in timers.items()}
    if option == "max":
        return ["max time across ranks (ms):", *(f"    {name}: {most:.2f}" for name, (_, most) in named.items())]
    spreads = (f"    {name}: ({least:.2f}, {most:.2f})" for name, (least, most) in named.items())
    return ["(min, max) time across ranks (ms):", *spreads]


def job(option: str | None, *, first: int = 0, means: list[float], pause: float = 0.0) -> list[str]:
    """Return the log of a job that logs every ten iterations, pausing once for a checkpoint."""
    at = datetime(2026, 11, 2, 10)
    rows = ["using world size: 4", *block(option or "max", {"model-and-optimizer-setup": (810.0, 815.0)})]
    rows += [
        line(first + 1, at, 9000.0, loss=10.0),
        *(block(option, {"forward-backward": (1.0, 2.0)}) if option else []),
    ]
    for k, mean in enumerate(means):
        number = first + 10 * (k + 1)
        at += timedelta(milliseconds=10 * mean)
        rows.append(line(number, at, mean, loss=10.0 / number))
        if option:
            scaled = {name: (least + k, most + k) for name, (least, most) in TIMERS.items()}
            rows += block(option, scaled)
        if k == 1 and pause:
            at += timedelta(seconds=pause)
            rows += ["saving checkpoint", *block(option or "max", {"save-checkpoint": (pause * 900, pause * 1000)})]
    return rows


def report_on(path: Path, rows: list[str], **more: Any) -> Any:
    path.write_text("\n".join(rows) + "\n")
    with open_run(path) as run:
        found = analyse(run, **more)
    validated("report", as_json(found))
    return found


def words(report: Any) -> str:
    return " | ".join(remark.text for remark in report.remarks)


@pytest.mark.parametrize("option", ["max", "minmax", "all"])
@pytest.mark.parametrize("before", ["", "[default3]:", "3: "])
def test_what_the_log_holds(tmp_path, option, before):
    """Times and timers are medians of what the lines say, without the first, whatever a launcher puts before them."""
    means = [960.0, 940.0, 1000.0, 955.0]
    report = report_on(tmp_path / "train.out", [before + row for row in job(option, means=means, pause=20.0)])
    logged = report.logged
    assert (logged.steps, logged.times) == ((1, 10, 20, 30, 40), (9e6, *(mean * 1e3 for mean in means)))
    assert logged.time.median == pytest.approx(median(means) * 1e3)
    assert logged.samples_per_second == pytest.approx(median(BATCH / mean * 1e3 for mean in means))
    found = {timer.name: timer for timer in logged.timers}
    assert [*found] == [*TIMERS, "save-checkpoint"]
    for name, (least, most) in TIMERS.items():
        timer = found[name]
        assert (timer.count, timer.most) == (4, pytest.approx((most + 1.5) * 1e3))
        assert timer.least == (None if option == "max" else pytest.approx((least + 1.5) * 1e3))
        assert timer.share == pytest.approx((most + 1.5) / median(means))
    saved = found["save-checkpoint"]
    assert (saved.count, saved.most, saved.share) == (1, pytest.approx(20e6), None)
    assert logged.outside == pytest.approx(20e6)
    assert logged.elapsed == pytest.approx(20e6 + 10 * sum(means[1:]) * 1e3)
    assert "20.0 s from the first of these lines to the last" in words(report)
    curves = {curve.name: curve for curve in report.curves}
    assert [*curves] == ["loss", "learning rate", "grad norm"]
    assert curves["loss"].steps == logged.steps
    assert curves["loss"].values == pytest.approx([10.0, 1.0, 0.5, 1 / 3, 0.25], rel=1e-6)
    assert "The bubble cannot be computed" in report.verdict.text


def test_a_log_in_the_terminal(tmp_path, capsys):
    """The terminal shows iterations, timers and curves, also of a compressed log, and compares two of them."""
    texts = ["\n".join(job("minmax", means=[mean, mean, mean])) for mean in (1000.0, 900.0)]
    paths = [tmp_path / name for name in ("a.log.gz", "b.log")]
    paths[0].write_bytes(gzip.compress(texts[0].encode()))
    paths[1].write_text(texts[1])
    assert main(["report", str(paths[0]), "--width", "80"]) == 0
    shown = capsys.readouterr().out
    assert "An iteration takes 1.00 s, the median of 3 logged lines." in shown
    assert all(name in shown for name in (*TIMERS, "loss", "samples/s"))
    assert main(["report", *map(str, paths), "--width", "80"]) == 0
    both = capsys.readouterr().out
    assert "The second run takes 10.0% less time per step: -100 ms in the median step." in both
    assert "settings are the same" not in both


def test_a_log_on_the_page(tmp_path):
    """The page has the timers, the time of iterations and the other curves."""
    path = tmp_path / "a.log"
    report = report_on(path, job("max", means=[900.0, 950.0]))
    with open_run(path) as run:
        payload = page_payload(run, report)
    assert payload["timers"][0] == ["forward-backward", None, pytest.approx(850.5e3), pytest.approx(850.5 / 925), 2]
    assert [curve["name"] for curve in payload["curves"]][:2] == ["iteration (ms)", "loss"]
    assert payload["curves"][0]["values"] == [9000.0, 900.0, 950.0]


def test_logs_are_compared_by_iteration(tmp_path):
    """Curves of two logs are put side by side, the time of iterations first; no part of a step is made up."""
    reports = [report_on(tmp_path / "a.log", job(None, means=means)) for means in ([800.0, 800.0], [800.0, 900.0])]
    comparison = compare(*reports)
    first = comparison.curves[0]
    assert (first.name, first.steps) == ("step time", (1, 10, 20))
    assert first.values == ((9e6, 8e5, 8e5), (9e6, 8e5, 9e5))
    assert not comparison.parts
    assert "--timing-log-level" in words(reports[0])


def test_a_restarted_program(tmp_path):
    """Of a log with several starts, the iterations since the last are shown, and the report says so."""
    rows = job("minmax", means=[700.0, 700.0, 700.0]) + job("minmax", first=20, means=[900.0, 910.0])
    report = report_on(tmp_path / "a.log", rows)
    assert report.logged.steps == (21, 30, 40)
    assert report.logged.time.median == pytest.approx(905e3)
    assert "the program started 2 times" in words(report)


def test_some_steps_of_a_log(tmp_path):
    """`--steps` takes the lines about these iterations, of which none is the first of the program."""
    rows = job("minmax", means=[900.0, 910.0, 920.0, 930.0], pause=5.0)
    report = report_on(tmp_path / "a.log", rows, steps=range(30, 41))
    assert (report.logged.steps, report.logged.counted) == ((30, 40), 2)
    assert report.logged.time.median == pytest.approx(925e3)
    assert {timer.name for timer in report.logged.timers} == {*TIMERS}
    with pytest.raises(ValueError, match=r"no line is about iterations 41 to 50 \(iterations: 1 to 40\)"):
        report_on(tmp_path / "a.log", rows, steps=range(41, 51))
    with pytest.raises(ValueError, match="a training log cannot be narrowed to partition 1"):
        report_on(tmp_path / "a.log", rows, partition=1)


def test_losses_that_are_not_finite(tmp_path):
    """A log leaves such losses out: the curve has a gap, and their number is a remark."""
    at = datetime(2026, 11, 2)
    rows = [line(k, at, 100.0, loss=None if k == 2 else 1.0, nan=int(k == 2)) for k in (1, 2, 3)]
    report = report_on(tmp_path / "a.log", [*rows, line(4, at, math.nan)])
    assert report.curves[0].steps == (1, 3)
    assert "0 iterations skipped, 1 with a loss that is not finite" in words(report)
    assert "skipped: 1 line of iterations without a time" in words(report)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(["", "nan", "-inf", "9" * 30, ".", "|", "\0", "{", ": ", "\n"])),
        max_size=6,
    )
)
def test_damaged_logs(tmp_path, changes):
    """Whatever a log was changed to, it is reported with numbers that JSON has, or is refused as no log."""
    text = "\n".join(job("minmax", means=[900.0, 910.0], pause=1.0))
    for at, insert in changes:
        place = len(text) * at // 401
        text = text[:place] + insert + text[place + 3 :]
    path = tmp_path / "a.log"
    path.write_text(text)
    try:
        run = open_run(path)
    except NotARunError:
        return
    with run:
        report = analyse(run)
    validated("report", as_json(report))
    assert render(report, width=40)


def test_only_one_line(tmp_path):
    """A first line counts if there is no other, but not its timers, which may be divided by more iterations."""
    report = report_on(tmp_path / "a.log", job("minmax", means=[]))
    assert (report.logged.steps, report.logged.time.median, report.logged.timers) == ((1,), 9e6, ())
    assert "timers are left out" in words(report)


def test_other_text_is_no_log(tmp_path, capsys):
    """Text without such lines is refused as before, and a log is no dataset."""
    (tmp_path / "a.log").write_text("iteration 3 done\nelapsed time per iteration (ms): 5\n")
    assert main(["report", str(tmp_path / "a.log")]) == 2
    assert "no events in" in capsys.readouterr().err
    (tmp_path / "b.log").write_text("\n".join(job("max", means=[900.0])))
    assert main(["convert", str(tmp_path / "b.log"), "--to", "parquet"]) == 2
    assert "a training log has no events to make a dataset of" in capsys.readouterr().err
