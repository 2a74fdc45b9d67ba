"""The architecture page names files, functions and classes that exist, and all rooms."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "pipesight"


def test_files_exist():
    """A path is one in the package or in the repository; a bare name is a file in the folder named before."""
    for line in PAGE.split("\n\n"):
        folders = [SOURCE, ROOT]
        for name in re.findall(r"`([\w/]+\.(?:py|css|yml|toml|md))`", line):
            found = [folder / name for folder in folders if (folder / name).is_file()]
            assert found, f"{name} is named in: {line.strip()[:80]}"
            folders.append(found[0].parent)


def test_names_exist():
    """What is called `module.py`: `name` is defined there."""
    pairs = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", PAGE)
    assert len(pairs) > 10
    for file, name in pairs:
        text = (SOURCE / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:def|class) {name.rpartition('.')[2]}\b", text, re.MULTILINE), f"{file}: {name}"


def test_all_rooms_are_in_the_table():
    """Every package and every public module is listed."""
    table = PAGE.partition("\n## Rooms\n")[2].partition("\n`pyproject.toml`")[0]
    rooms = {f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    modules = {path.name for path in SOURCE.glob("[a-z]*.py")}
    assert {name for name in rooms | modules if f"`{name}`" not in table} == set()
