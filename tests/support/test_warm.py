"""A process that begins with torch imported is like one that Python starts."""

from __future__ import annotations

import subprocess

import pytest

from support import warm
from support.processes import STRICT_PYTHON

SEES = """
import atexit, os, sys, warnings
atexit.register(print, "the end")
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("MINE"), sys.stdin.read())
try:
    warnings.warn("an error")
except UserWarning as error:
    print("raised", error, file=sys.stderr)
"""


@pytest.mark.parametrize("begin", [["-c", SEES], ["-m", "sees"], ["sees.py"]], ids=["code", "module", "script"])
def test_a_program_sees_the_same(begin, tmp_path):
    """Its name, arguments, path, folder, environment, input and warnings are those that Python gives it."""
    (tmp_path / "sees.py").write_text(SEES)
    environment = {"MINE": "7"}
    arguments = [*begin, "--one", "two"]
    expected = subprocess.run(
        [*STRICT_PYTHON, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=60,
    )
    found = warm.run(*arguments, cwd=tmp_path, env=environment)
    assert "the end" in expected.stdout
    assert expected.stderr == "raised an error\n"
    assert (found.returncode, found.stdout, found.stderr) == (0, expected.stdout, expected.stderr)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os; os._exit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_it_ends_the_same(code, status):
    """Its exit code says how it ended, and a traceback comes where Python has one."""
    ended = warm.run("-c", code)
    assert ended.returncode == status
    assert ("Traceback" in ended.stderr) == (status == 1)
