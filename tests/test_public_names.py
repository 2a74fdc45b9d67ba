"""What ``import pipesight`` gives: public names, lazily, and nothing else in ``dir`` and ``help``."""

from __future__ import annotations

import importlib
import json
import pydoc
import subprocess
import sys

import pytest

import pipesight

MODULES = ["balance", "context", "distributed", "logs", "plan", "report", "skip", "stats", "testing", "trace"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_cheap():
    """It loads three small modules: no torch, no numpy, none of the rooms."""
    code = """
import json, sys
before = set(sys.modules)
import pipesight
dir(pipesight)
print(json.dumps(sorted(set(sys.modules) - before - set(sys.stdlib_module_names))))
"""
    loaded = [name for name in json.loads(run(code)) if name.partition(".")[0] not in sys.stdlib_module_names]
    assert loaded == ["pipesight", "pipesight._lazy", "pipesight._version"]


def test_modules_are_attributes():
    """Each is there after ``import pipesight`` alone; plan and report still need no torch."""
    code = f"""
import json, sys, pipesight
pipesight.plan.simulate, pipesight.report.analyse
light = "torch" not in sys.modules
print(json.dumps([light, [getattr(pipesight, name).__name__ for name in {MODULES}]]))
"""
    assert json.loads(run(code)) == [True, [f"pipesight.{name}" for name in MODULES]]


def test_every_public_name_resolves():
    for name in pipesight.__all__:
        assert getattr(pipesight, name) is not None
    for module in MODULES:
        home = importlib.import_module(f"pipesight.{module}")
        for name in home.__all__:
            assert getattr(home, name) is not None, (module, name)


@pytest.mark.parametrize("name", ["", *MODULES])
def test_dir_shows_public_names_only(name):
    module = importlib.import_module(f"pipesight.{name}".rstrip("."))
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("name", ["", "plan", "report", "stats", "trace", "distributed"])
def test_help_shows_public_names_only(name):
    """Of its sections, PACKAGE CONTENTS lists the files of a folder, whatever the package says."""
    module = importlib.import_module(f"pipesight.{name}".rstrip("."))
    page = pydoc.plain(pydoc.render_doc(module))
    shown = {
        line.strip().partition(" ")[0] for line in page.splitlines() if line.startswith("    ") and line[4:5] != " "
    }
    private = {key for key in vars(module) if key not in module.__all__ and not key.startswith("__")}
    files = {line.split(" ")[0] for line in _section(page, "PACKAGE CONTENTS")}
    assert not (shown & private) - files
    for public in module.__all__:
        assert public in page or public == "__version__"  # it has a section of its own


def _section(page: str, title: str) -> list[str]:
    """The lines of one section of a help page."""
    lines = page.splitlines()
    if title not in lines:
        return []
    rest = lines[lines.index(title) + 1 :]
    return [line.strip() for line in rest[: rest.index("") if "" in rest else None]]


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"module 'pipesight' has no attribute 'nothing'"):
        pipesight.nothing  # noqa: B018


@pytest.mark.parametrize(
    "module", ["pipesight", "pipesight.trace", "torchgpipe", "dftracer.logger", "nvdlfw_inspect.api"]
)
def test_windows_is_refused(module):
    """At the first import and with a sentence, not by an attribute that is missing later."""
    code = f"import os, sys; os.name, sys.platform = 'nt', 'win32'; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: pipesight does not run on Windows: it relies on fork")
    assert "WSL 2" in last
