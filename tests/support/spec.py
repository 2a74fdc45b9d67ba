"""Documents of the projects that the shims stand in for. They are not ours, so they are not in this repository.

PIPESIGHT_SPEC names the folder they are in; by default that is `shared/spec` beside the checkout. Without them the
tests that run their code are skipped. Each behaviour that they describe has a test of our own as well: see
tests/shims/behaviours.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["document"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("PIPESIGHT_SPEC") or ROOT.parent / "shared" / "spec")


def document(name: str) -> str:
    """Return the text of a document, or skip the test module that asks for it."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {FOLDER}: set PIPESIGHT_SPEC to its folder", allow_module_level=True)
    return path.read_text(encoding="utf-8")
