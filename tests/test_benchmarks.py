"""The page of results: made of the file of results, which runs of benchmarks replace section by section."""

from __future__ import annotations

import json

import pytest
from benchmarks import __main__ as command
from benchmarks.harness import Contender, Options, Outcome, Turn
from benchmarks.job import Job
from benchmarks.page import JSON, MARKDOWN, render
from benchmarks.results import Section, load, merge, save
from benchmarks.tables import Goal, Spread, Table, show, show_goals, take_tables

pytestmark = pytest.mark.slow  # results say which commit they are of: git is asked


def outcome(name: str, milliseconds: list[float]) -> Outcome:
    turns = [Turn(seconds=time / 1e3, peak_bytes=0, cpu_seconds=0.0) for time in milliseconds]
    return Outcome(Contender(name, Job(engine="whole", workload="none"), None), turns)


def a_benchmark(options: Options) -> bool:
    ours, theirs = outcome("ours", [10, 12, 11]), outcome("theirs", [20, 36, 11])
    absent = Outcome(Contender("absent", Job(engine="torchgpipe", workload="none"), None), skipped="no such package")
    sound = show("A step", [theirs, ours, absent], reference="theirs", kind="speed", note="Two cores.")
    show_goals([theirs, ours, absent], [Goal("ours", "theirs", "speed", 1.6), Goal("ours", "absent", "speed", 1.0)])
    return sound


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Run a made-up benchmark as the command line does; return the file of results."""
    monkeypatch.setattr(command, "BENCHMARKS", {"made_up": (a_benchmark, "A title."), "other": (a_benchmark, "B.")})
    file = tmp_path / "results.json"
    assert command.main(["--quick", "--json", str(file)]) == 0
    return file


def section(name: str = "spans", *, date: str = "2026-01-01 00:00", gpu: str | None = None) -> Section:
    machine = {"processor": "P", "cores": 2, "load": 0.0, "system": "Linux", "gpu": gpu}
    tables = [Table("T", ["what", "figure"], [["a", Spread(1.0, 2.0, 3.0)], ["b", 1234], ["c", None]])]
    return Section(name, "Title.", "python -m benchmarks", date, "abc", "full", 1.0, machine, {"torch": "2"}, tables)


def test_ratios_are_taken_within_rounds(measured):
    """The medians of ours and theirs are 11 and 20; the median of the ratios 2, 3 and 1 is 2."""
    (table,) = load(measured)[0].tables
    assert table.rows[0] == ["theirs", Spread(15.5, 20.0, 28.0), Spread(1.0, 1.0, 1.0)]
    assert table.rows[1] == ["ours", Spread(10.5, 11.0, 11.5), Spread(1.5, 2.0, 2.5)]
    assert table.rows[2] == ["absent", "skipped: no such package"]
    assert [goal[1:] for goal in table.goals] == [
        [Spread(1.5, 2.0, 2.5), "at least 1.60", "met"],
        [None, "at least 1.00", "not measured"],
    ]


def test_results_say_where_they_are_from(measured):
    found = json.loads(measured.read_text())
    assert found["format"] == 1
    one = found["sections"][0]
    assert one["size"] == "quick"
    assert one["command"] == "python -m benchmarks made_up --quick"
    assert one["machine"]["cores"] > 0
    assert {"pipesight", "Python", "torch"} <= one["versions"].keys()
    assert one["commit"]
    assert one["seconds"] >= 0


def test_a_run_replaces_its_own_section(measured):
    before = {one.benchmark: one for one in load(measured)}
    assert command.main(["other", "--json", str(measured)]) == 0
    after = {one.benchmark: one for one in load(measured)}
    assert list(after) == ["made_up", "other"]
    assert after["made_up"] == before["made_up"]
    assert (before["other"].size, after["other"].size) == ("quick", "full")


def test_results_of_other_machines_are_kept_apart():
    order = ["gpu", "spans"]
    ours, theirs = section(), section(gpu="H200")
    newer = section(date="2026-02-01 00:00")
    assert merge([ours], [theirs, section("gone"), section("gpu", gpu="H200")], order) == [
        section("gpu", gpu="H200"),
        ours,
        theirs,
    ]
    assert merge([ours], [newer], order) == merge([newer], [ours], order) == [newer]


def test_page(measured):
    page = render(load(measured))
    assert "## A title\n\nA title.\n" in page
    assert "| contender | ms per step | speed against theirs |\n| --- | ---: | ---: |\n" in page
    assert "| ours | 11.0 (10.5..11.5) | 2.00 (1.50..2.50) |" in page
    assert "| absent | skipped: no such package |  |" in page
    assert "| speed of ours against theirs | 2.00 (1.50..2.50) | at least 1.60 | met |" in page
    assert "A quick run" in page
    assert "A quick run" not in render([section(gpu="H200")])
    assert "## Title, on H200\n" in render([section(gpu="H200")])
    assert "| b | 1,234 |" in render([section()])


def test_page_command_merges_and_writes(measured, tmp_path):
    save(tmp_path / "gpu.json", [section("made_up", gpu="H200")])
    out = tmp_path / "page.md"
    arguments = ["page", "--json", str(measured), "--merge", str(tmp_path / "gpu.json"), "--out", str(out)]
    assert command.main(arguments) == 0
    assert [one.place for one in load(measured)] == [("made_up", ""), ("made_up", "H200"), ("other", "")]
    assert out.read_text() == render(load(measured))


def test_unknown_format_is_refused(tmp_path):
    (tmp_path / "new.json").write_text('{"format": 2, "sections": []}')
    with pytest.raises(ValueError, match="format 2, not 1"):
        load(tmp_path / "new.json")


def test_nobody_typed_the_page():
    assert MARKDOWN.read_text(encoding="utf-8") == render(load(JSON))
    assert not [one.benchmark for one in load(JSON) if one.size == "quick"]


@pytest.fixture(autouse=True)
def _no_tables_left():
    yield
    assert take_tables() == []
