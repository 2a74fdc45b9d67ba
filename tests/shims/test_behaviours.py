"""Every behaviour that peers' documents describe has a test of our own, which needs no such document."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("behaviours.md").read_text()


def test_tests_of_the_table_exist():
    """Each line of the tables names tests that exist, and none that is skipped without the documents."""
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| Behaviour ")]
    assert len(rows) > 40
    for row in rows:
        found = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert found, row
        for file, name in found:
            text = (TESTS / file).read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file}::{name}"
            assert "support.spec" not in text, file
