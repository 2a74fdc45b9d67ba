"""Fixtures for tests of tracing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import pipesight.trace as trace
from support.traced import PREAMBLE, tree_put_back


@pytest.fixture(autouse=True)
def _no_trace(monkeypatch):
    """Start without settings in the environment; leave no trace running, and the tree of events as it was."""
    for name in list(os.environ):
        if name.startswith(("PIPESIGHT_", "DFTRACER_")):
            monkeypatch.delenv(name)
    with tree_put_back():
        yield
        trace.stop()


@pytest.fixture
def script(tmp_path):
    """Run a script, with its trace in ``run`` of the test's directory."""

    def run(body: str, *, wait: bool = True, launcher: tuple[str, ...] = (), **env: object) -> Any:
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + body)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIPESIGHT_")}
        process = subprocess.Popen(
            [*(launcher or (sys.executable,)), str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**inherited, **{name: str(value) for name, value in env.items()}},
            cwd=tmp_path,
        )
        if wait:
            process.output, process.errors = process.communicate(timeout=100)  # type: ignore[attr-defined]
        return process

    return run
