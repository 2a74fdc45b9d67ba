"""The page's JavaScript: functions that need no browser, run by node with its own test runner."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pipesight.view

NODE = shutil.which("node")
TESTS = Path(__file__).parent / "js"
OLDEST = 20  # its test runner is there to stay


def _version() -> int:
    found = re.match(r"v(\d+)", subprocess.run([NODE or "", "--version"], capture_output=True, text=True).stdout)
    return int(found[1]) if found else 0


@pytest.mark.skipif(NODE is None, reason="node is not installed; the page itself is tested in Chromium")
def test_pure_functions(tmp_path):
    if _version() < OLDEST:
        pytest.skip(f"node is older than {OLDEST}")
    for folder in (Path(pipesight.view.__file__).parent / "assets", TESTS):
        for script in folder.glob("*.js"):
            shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    files = sorted(path.name for path in TESTS.glob("*.test.js"))
    done = subprocess.run(
        [NODE or "", "--test", "--test-reporter=tap", *files], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= sum(
        len(re.findall(r"^(?:test|table)\(", (TESTS / name).read_text(), re.M)) for name in files
    )
