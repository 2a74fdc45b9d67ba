"""The table of models that can be cut as they are has those that the tests run."""

import re
from pathlib import Path

from zoo import ZOO

PAGE = Path(__file__).resolve().parents[2] / "docs" / "any-model-table.md"


def test_all_models_are_listed_and_work():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| .+ \| `", line)]
    assert [(row[0], row[1]) for row in rows] == [(entry.name, f"`{entry.cuts[1]}`") for entry in ZOO]
    assert all(re.fullmatch(r"works \(\de-\d\d\)", row[2]) for row in rows)
