"""The report for machines: as its schema says, without NaN, and with numbers that add up."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.analysis.analyse import analyse
from pipesight.analysis.comparison import compare
from pipesight.analysis.report import Report
from pipesight.runs.reading.run import open_run
from pipesight.view.comparison_json import comparison_as_json
from pipesight.view.report_json import as_json
from support.schemas import NAMES, read_schema, validated
from support.synthetic import Made


def checked(report: Report) -> dict:
    """Return a report as JSON, through JSON, after comparing it with the schema."""
    return validated("report", as_json(report))


def report_of(made: Made) -> Report:
    with open_run(made.write()) as run:
        return analyse(run)


def fill(made: Made, steps: int = 6, **options) -> Made:
    at = 0
    for step in range(steps):
        at = made.gpipe(step, lambda phase, i, j: 100 + 10 * j, at=at, layers=lambda j: [f"l{j}"], **options)
        made.span("compute", "step", begin=at, dur=50)
        at += 60
    return made


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_schemas(name):
    """A schema is valid, and knows every field of what a command prints: another is an error."""
    schema = read_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is (name == "run")
    if name != "statistics":
        assert set(schema["required"]) | {"recorded"} >= set(schema["properties"])


def test_whole_run(tmp_path):
    """A run with steps, layers, statistics and remarks is as the schema says, and its numbers add up."""
    made = fill(Made(tmp_path / "run", balance=[1, 1, 1], chunks=3, outcome="KeyError: 'x'"), checkpointed=2)
    made.stats[0] = [{"iteration": 0, "layer": "l1", "tensor": "input", "nonfinite": "inf", "infs": 1}]
    value = checked(report_of(made))
    overall = value["overall"]
    assert sum(part["time"] for part in overall["parts"].values()) == pytest.approx(overall["time"]["mean"])
    assert sum(part["share"] for part in overall["parts"].values()) == pytest.approx(1)
    for step in value["steps"]:
        assert sum(step["parts"].values()) == pytest.approx(step["time"])
    (pipeline,) = value["pipelines"]
    for row in pipeline["rows"]:
        assert row["busy"] + sum(row["losses"].values()) == pytest.approx(pipeline["window"]["mean"])
        assert sum(row["phases"].values()) == pytest.approx(row["busy"])
    assert value["nonfinite"]["layer"] == "l1"
    assert value["run"]["outcome"] == "KeyError: 'x'"
    assert value["verdict"]["text"].endswith("The run ended with KeyError: 'x'.")
    assert [layer["name"] for layer in value["layers"]] == ["l0", "l1", "l2"]


def test_trace_without_tasks(tmp_path):
    """A trace without tasks is as the schema says, too: with names, and no bubble."""
    made = Made(tmp_path / "run")
    made.span("posix", "read", begin=0, dur=5)
    value = checked(report_of(made))
    assert value["overall"] is None
    assert value["names"] == [{"category": "posix", "name": "read", "count": 1, "total": 5}]


def test_ranks_and_evaluations(tmp_path):
    """Replicas, stragglers and evaluations are as the schema says."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=1)
    for rank in range(3):
        at = 0
        for step in range(8):
            slow = 3 if (rank, step) == (1, 4) else 2 if rank == 2 else 1
            at = made.gpipe(step, lambda *_, slow=slow: 1000 * slow, at=at, rank=rank)
        for j in range(2):
            made.task(8, partition=j, microbatch=0, phase="forward", begin=at + 10 * j, dur=10, rank=rank)
    value = checked(report_of(made))
    assert value["evaluations"] == 3
    assert {straggler["rank"] for straggler in value["stragglers"]} == {1, 2}
    assert value["pipelines"][0]["replicas"] == 3


odd = st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.lists(st.floats(), max_size=2)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(["command", "host", "started", "outcome", "world_size", "pipelines"]), odd))
@settings(deadline=None, max_examples=25)
def test_any_facts_are_plain(tmp_path_factory, facts):
    """Whatever the description holds, NaN and infinities included, the JSON is strict, and as the schema says."""
    made = fill(Made(tmp_path_factory.mktemp("facts") / "run", chunks=1, **facts), steps=1)
    checked(report_of(made))


def test_comparison_has_both(tmp_path):
    """A comparison holds both reports, and the differences between them."""
    reports = [report_of(fill(Made(tmp_path / name, chunks=chunks))) for name, chunks in (("a", 2), ("b", 4))]
    value = validated("comparison", comparison_as_json(compare(*reports)))
    computing = value["parts"]["computing"]
    assert computing["change"] == computing["second"] - computing["first"] > 0
