"""What a wheel and a source distribution contain."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import pipesight

pytest.importorskip("hatchling", reason="hatchling builds the distributions, and is not installed")

ROOT = Path(__file__).parents[1]
SHIMS = [ROOT / "shims" / name for name in ("torchgpipe", "dftracer", "nvdlfw_inspect")]
ADDRESS = "https://github.com/pipesight/pipesight"


def build(project: Path, target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("project", [ROOT, *SHIMS], ids=lambda project: project.name)
def test_wheel(project, tmp_path):
    """Each has the licence, the types, the version and the address of the project."""
    with zipfile.ZipFile(build(project, "wheel", tmp_path)) as wheel:
        names = wheel.namelist()
        read = {re.sub(r"^[^/]*\.dist-info/", "", name): wheel.read(name) for name in names if ".dist-info/" in name}
    assert read["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = email.message_from_bytes(read["METADATA"])
    assert metadata["Version"] == pipesight.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert {url.partition(", ")[2].startswith(ADDRESS) for url in metadata.get_all("Project-URL")} == {True}
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert all(f"{package}/py.typed" in names for package in packages)
    if project == ROOT:
        assert packages == {"pipesight"}
        on_disk = {
            str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/pipesight").rglob("*") if path.is_file()
        }
        assert {name for name in names if name.startswith("pipesight/")} == {
            name for name in on_disk if "__pycache__" not in name
        }
        assert "pipesight/demo/sonnets.md" in names  # says where the text is from


def test_source_distribution(tmp_path):
    """It holds what a wheel is built from, and the documents of a release: no tests, benchmarks or pictures."""
    with tarfile.open(build(ROOT, "sdist", tmp_path)) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    outside = {name for name in names if not name.startswith("src/pipesight/")}
    assert outside == {
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
    }
    assert not [name for name in names if name.endswith(".png")]


def test_versions_agree():
    version = pipesight.__version__
    for shim in SHIMS:
        project = tomllib.loads((shim / "pyproject.toml").read_text())["project"]
        assert project["version"] == version
        assert project["dependencies"] == [f"pipesight=={version}"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## \[(\d[^]]*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
    assert f"\ndate-released: {newest[2]}\n" in (ROOT / "CITATION.cff").read_text()
