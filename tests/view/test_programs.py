"""Programs without a pipeline in the terminal, in JSON, on the page and in notebooks."""

from __future__ import annotations

import json

import pytest

from analysis.test_programs import FACTS, STEP, point, step
from pipesight.analysis.analyse import analyse
from pipesight.runs.reading.run import open_run
from pipesight.view.page import page_html, page_payload
from pipesight.view.payload.size_limits import LIMITS
from pipesight.view.report_json import as_json
from pipesight.view.text_report import render
from support.schemas import validated
from support.synthetic import Made


@pytest.fixture
def folder(tmp_path):
    made = Made(tmp_path / "run", pipelines=[], program=FACTS)
    for number in range(8):
        step(made, number)
        point(made, "counter", "loss", at=number * STEP + 400, loss=1.0 / (number + 1))
    point(made, "instant", "dropped", at=3 * STEP + 10, lr=0.1)
    return made.write()


@pytest.fixture
def report(folder):
    with open_run(folder) as run:
        yield analyse(run)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_terminal(report, width):
    """The terminal shows speed, a step, the parts, modules, spans, curves and the way to a pipeline, in its width."""
    text = render(report, width=width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("Step time", "Throughput", "Step 0,", "data loading", "metrics", "Slowest modules", "Your spans"):
        assert part in text
    assert "Your instants: dropped in step 3\n" in text
    assert "Pipeline(model, cuts=" in " ".join(text.split())
    assert render(report, ascii=True).isascii()


def test_a_step_that_is_asked_for(report):
    """Any step can be drawn; one that was not recorded is refused."""
    drawn = next(line for line in render(report, step=3, width=112).splitlines() if "|" in line or "│" in line)
    cells = drawn.split("│")[1]
    assert [cells.count(letter) for letter in "dFlBo·"] == [10, 20, 5, 30, 5, 20]
    with pytest.raises(ValueError, match=r"no step 99 was recorded \(recorded: 0 to 7\)"):
        render(report, step=99)


def test_json(report):
    """JSON is as the schema says, and its parts add up."""
    value = validated("report", as_json(report))
    program = value["program"]
    assert sum(part["time"] for part in program["parts"]) == pytest.approx(program["time"]["mean"])
    assert [part["name"] for part in program["parts"] if part["own"]] == ["inner", "metrics"]
    for row in program["steps"]:
        assert sum(row["parts"].values()) == row["time"]
    assert value["curves"][0]["name"] == "loss"
    assert value["moments"][0]["name"] == "dropped"


def test_page(folder, report):
    """The page has the spans of a step, nested, with their names, the parts of the mean step, curves and instants."""
    with open_run(folder) as run:
        payload = json.loads(json.dumps(page_payload(run, report), allow_nan=False))
    shown = next(entry for entry in payload["shown"] if entry["number"] == 3)
    spans = shown["spans"]
    rows = zip(
        spans["begin"], spans["time"], spans["level"], (payload["span_names"][k] for k in spans["name"]), strict=True
    )
    assert {(350, 100, 0, "metrics"), (360, 30, 1, "inner"), (100, 200, 0, "Net"), (110, 50, 1, "a")} <= {*rows}
    assert shown["moments"] == [[0, 10, "dropped", '{"lr":0.1}']]
    assert sum(payload["losses"]["run"]["all"]) == STEP
    assert sum(shown["losses"]) == STEP
    assert payload["curves"][0]["values"][:2] == [1.0, 0.5]
    assert payload["levels"] == {"0": 2}
    assert page_html(payload)


def test_long_runs_fit(tmp_path):
    """A page shows some of many steps, and says so."""
    made = Made(tmp_path / "run", pipelines=[])
    for number in range(60):
        step(made, number)
    with open_run(made.write()) as run:
        limits = LIMITS
        for _ in range(8):
            limits = limits.halved()
        payload = page_payload(run, analyse(run), limits=limits)
    assert 0 < len(payload["shown"]) < 60
    assert len(payload["steps"]["number"]) == 60
    assert "of 60 steps" in payload["notes"][0]


def test_notebook(folder, report):
    """A report and a run show themselves in a notebook: the verdict, a step drawn, where the time goes."""
    with open_run(folder) as run:
        html = run._repr_html_()
    assert html == report._repr_html_()
    for part in ("A step takes", "<svg", "metrics: 100 µs", "where the time goes", "fused=True"):
        assert part in html
    assert "<script" not in html
    assert repr(report).startswith(f"<Report {str(folder)!r}: A step takes")


def test_tables_for_pandas(folder):
    """A table becomes a DataFrame with the same columns; steps have one for each part, and these add up."""
    pandas = pytest.importorskip("pandas")
    with open_run(folder) as run:
        frame = run.program().to_pandas()
        assert isinstance(frame, pandas.DataFrame)
        assert frame["name"].tolist() == run.program().name.tolist()
        program = analyse(run).program
    steps = program.steps.to_pandas()
    assert steps["step"].tolist() == program.steps.step.tolist()
    assert steps[[*program.parts]].sum(axis=1).tolist() == pytest.approx(steps["period"].tolist())
    with pytest.raises(TypeError, match=r"open: analyse\(open_run\('"):
        analyse(folder)
