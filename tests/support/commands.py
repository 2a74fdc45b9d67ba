"""`pipesight` commands that need no process: those that only look at runs, where no test is about the process.

Importing what a command needs takes longer than all else that it does.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from pipesight.cli import main

__all__ = ["pipesight"]


def pipesight(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process; return what it wrote, and its exit code.

    Args:
        arguments: What follows ``pipesight`` on the command line.
        cwd: The folder to run in.
        env: Variables beside those of this process; ``COLUMNS`` is 80 unless it is one of them.
    """
    words = list(map(str, arguments))
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    surroundings = mock.patch.dict(os.environ, {"COLUMNS": "80", **(env or {})})
    folder = contextlib.chdir(cwd) if cwd else contextlib.nullcontext()
    with folder, surroundings, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    written = []
    for stream in (output, errors):
        stream.seek(0)
        written.append(stream.read())
    return subprocess.CompletedProcess(words, code, *written)
