"""What the tests of the shim for DFTracer share: a trace of a call, scripts, and ways to read a trace."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import subprocess
import sys
import textwrap

from dftracer.logger import dftracer as tracer


@contextlib.contextmanager
def clean_environment(monkeypatch):
    """Enable DFTracer; let nothing but the test say how to trace, and end what it began."""
    for name in [name for name in os.environ if name.startswith(("DFTRACER_", "PIPESIGHT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DFTRACER_ENABLE", "1")
    level = logging.getLogger("pipesight.trace").level
    yield
    tracer.get_instance().finalize()
    logging.getLogger("pipesight.trace").setLevel(level)


def read(path):
    """Return the lines of a trace; it is whole."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    first, *lines, last = text.splitlines()
    assert (first, last) == ("[", "]")
    return [json.loads(line) for line in lines]


def user(lines):
    """Return the events of the program."""
    return [line for line in lines if line["ph"] == "X" and line["cat"] != "dftracer"]


def own(event):
    return {key: value for key, value in event["args"].items() if key not in ("hhash", "p_idx", "level")}


def events_of(function, folder):
    """Trace a call, and return the events in the order they end."""
    log = tracer.initialize_log(folder / "run.pfw")
    try:
        function()
    finally:
        log.finalize()
    path = folder / "run.pfw.gz"
    return user(read(path)) if path.exists() else []


def run_script(source, folder, **environment):
    """Run a script in a new process; return its standard error."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    surroundings = {**os.environ, **environment}
    ended = subprocess.run(
        [sys.executable, "-W", "error", path.name],
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def files(folder):
    return sorted(path.name for path in folder.iterdir() if ".pfw" in path.name)
