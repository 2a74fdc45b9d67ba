"""The tables of the reference are complete: what the code knows is there, and nothing else is."""

from __future__ import annotations

import re

import pytest

from pipesight.distributed import schedule_names
from pipesight.runs.reading.event_queries import COLUMNS
from pipesight.stats.builtin_features import KEYS
from pipesight.stats.moments.cast_statistics import CAST_STATISTICS
from pipesight.stats.moments.statistic_formulas import STATISTICS
from pipesight.trace.ai import CONVENTIONS
from support.documents import ROOT
from support.schemas import NAMES, read_schema


def page(name: str) -> str:
    return (ROOT / "docs/reference" / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """Return what stands below a heading of a page, up to the next of its depth, or above."""
    depth, _, _ = heading.partition(" ")
    _, found, rest = page(name).partition(f"{heading}\n")
    assert found, heading
    return re.split(rf"(?m)^#{{1,{len(depth)}}} ", rest)[0]


def first_column(text: str) -> set[str]:
    """Return the code in the first cells of tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return set(re.findall(r"`([^`]+)`", " ".join(cells)))


def test_columns_of_datasets():
    """Each column that a query knows is described, under the name that it has in a dataset."""
    renamed = {"rank": "process_rank", "begin": "started", "end": "ended"}
    renamed |= {"partition": "partition_index", "size": "size_bytes"}
    more = {"event", "id", "parent_id", "depth", "duration", "arguments", "other_fields"}
    assert first_column(page("dataset")) == {renamed.get(name, name) for name in COLUMNS} | more


def test_fields_of_run_json():
    """The fields of `run.json` are those of its schema."""
    schema = read_schema("run")
    found = {name.partition(".")[0] for name in first_column(section("run-directory", "## run.json"))}
    assert found == set(schema["properties"]) | set(schema["$defs"]["pipeline"]["properties"])
    listed = set(re.findall(r"`clock\.(\w+)`", page("run-directory")))
    assert listed == set(schema["properties"]["clock"]["properties"])


@pytest.mark.parametrize(("name", "heading"), [("report", "## report --json"), ("plan", "## plan --json")])
def test_fields_of_printed_json(name, heading):
    """The fields that commands print are those of their schemas."""
    found = {field.partition("[")[0] for field in first_column(section("json", heading))}
    assert set(read_schema(name)["properties"]) - {"format", "format_version", "pipesight"} <= found | {"bound_seconds"}


def test_schemas_are_listed():
    """Every schema is on the page of JSON formats."""
    assert all(f"`{name}.schema.json`" in page("json") for name in NAMES)


def test_parts_of_a_step():
    """The parts of a step have one definition each."""
    defined = set(re.findall(r"^\| [\w ]+ \| `(\w+)` \|", section("metrics", "## Parts of a step"), re.M))
    assert defined == set(read_schema("report")["$defs"]["parts"]["properties"])


def test_statistics():
    """Every statistic has its formula."""
    assert first_column(section("statistics", "## LogTensorStats")) == set(STATISTICS) | {"max_blockwise_dynamic_range"}
    found = first_column(section("statistics", "## LogFp8TensorStats, LogNvfp4TensorStats"))
    prefixes = {name for name in found if name.endswith("_")} | {"nvfp4_", ""}
    suffixes = {name for name in found if name.startswith("_")} | {"_columnwise_e5m2", ""}
    names = {f"{start}{name}{end}" for start in prefixes for name in found - prefixes - suffixes for end in suffixes}
    assert names >= set(CAST_STATISTICS)


def test_keys_of_configurations():
    """Every key of a feature is described."""
    assert first_column(section("statistics-configuration", "## Features")) == set(KEYS) | {"enabled"}


def test_schedules():
    """Every schedule that torch has is in both tables."""
    for name in schedule_names():
        assert page("schedules").count(f'| `"{name}"`') >= 2


def test_environment_variables():
    """Every variable that the package reads is described."""
    known = set(re.findall(r"`(\w+)`", page("environment")))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/pipesight").rglob("*.py"))
    read = set(re.findall(r'environ(?:\.get\(|\[)["\'](\w+)["\']', source)) | set(
        re.findall(r"NVDLFW_INSPECT_\w+", source)
    )
    read |= {f"PIPESIGHT_{name}" for name in re.findall(r'_(?:switch|read|seconds|limit)\("([A-Z_]+)"\)', source)}
    read |= {f"PIPESIGHT_{name}" for name in re.findall(r'_seconds\("([A-Z_]+)"', source)}
    assert len(read) > 15
    assert read - known == {"PIPESIGHT_PARENT", "PIPESIGHT_DATA_DIR", "TERM"}


def test_conventions():
    """The guide to annotations has every name of the conventions."""
    guide = (ROOT / "docs/how-to/annotate.md").read_text(encoding="utf-8")
    for category, names in CONVENTIONS.items():
        assert f"| `ai.{category}` | {', '.join(f'`{name}`' for name in names)} |" in guide
