"""The rooms of the package: which may import which, and nothing private of another's.

The layers themselves stand in ``pyproject.toml``; ``lint-imports`` prints the chain behind a breach.
"""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest
from importlinter import cli

ROOT = Path(__file__).resolve().parents[1]


def test_layers(monkeypatch):
    """Each room imports only from those below it, none in a circle, and those that read runs import no torch."""
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)  # it would disable every logger of this process
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None) == cli.EXIT_STATUS_SUCCESS


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("pipesight", cache_dir=None)


def home(module: str) -> str:
    """Return the part of a module's name in front of its first private part."""
    parts = module.split(".")
    private = next((k for k, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), None)
    return ".".join(parts[:private])


def test_private_modules(graph):
    """A module whose name begins with an underscore is imported from its own package only."""
    breaches = [
        f"{importer} imports {module}"
        for module in graph.modules
        if home(module) not in (module, "pipesight")
        for importer in graph.find_modules_that_directly_import(module)
        if not f"{importer}.".startswith(f"pipesight.{module.split('.')[1]}.")
    ]
    assert not breaches, "\n".join(sorted(breaches))
