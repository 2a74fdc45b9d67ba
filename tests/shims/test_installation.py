"""Shims beside the packages they stand for, and beside others that share a folder with them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIMS = Path(__file__).parents[2] / "shims"
PACKAGES = {
    "torchgpipe": ("torchgpipe", "torchgpipe", ["torchgpipe"]),
    "dftracer": ("dftracer", "dftracer", ["dftracer", "pydftracer"]),
    "dftracer.python": ("dftracer", "dftracer/python", ["dftracer", "pydftracer"]),
    "nvdlfw_inspect": ("nvdlfw_inspect", "nvdlfw_inspect", ["nvdlfw-inspect"]),
}


def install(folder: Path, distribution: str, file: str) -> None:
    """Leave the metadata that pip leaves for a distribution with one file."""
    metadata = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "RECORD").write_text(f"{file},,\n")


def load(name: str, package: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("name", PACKAGES)
def test_refused_among_the_files_of_the_real_package(name, tmp_path, monkeypatch):
    """A shim whose files are mixed with those of the real package raises, with the two commands that fix it."""
    shim, inside, real = PACKAGES[name]
    site = tmp_path / "site"
    shutil.copytree(SHIMS / shim / "src" / shim, site / shim)
    install(tmp_path / "elsewhere", real[-1], f"{inside}/__init__.py")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    load(name, site / inside)  # a real package in another folder does no harm
    install(site, real[-1], f"{inside}/__init__.py")
    monkeypatch.syspath_prepend(site)
    with pytest.raises(ImportError, match="each overwrites files of the other") as caught:
        load(name, site / inside)
    commands = [line.strip() for line in str(caught.value).splitlines()[2:] if line]
    assert commands[0] == f"pip uninstall --yes {' '.join(real)} pipesight-{shim.replace('_', '-')}"
    assert commands[1].startswith(f"pip install ./shims/{shim} ")


def test_room_for_other_packages_below_dftracer(tmp_path):
    """What others install below ``dftracer``, in another folder, can be imported; the shim's own files win."""
    for name in ("utils", "analyzer", "python"):
        package = tmp_path / "dftracer" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"where = 'other {name}'\n")
    script = """
import dftracer.analyzer, dftracer.python, dftracer.utils
print(dftracer.utils.where, dftracer.analyzer.where, dftracer.python.__version__)
"""
    surroundings = {**os.environ, "PYTHONPATH": f"{SHIMS / 'dftracer' / 'src'}{os.pathsep}{tmp_path}"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=surroundings, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "other utils other analyzer 2.0.6+pipesight\n"
