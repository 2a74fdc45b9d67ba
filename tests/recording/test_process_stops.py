"""A process that is stopped says for how long, as soon as it goes on."""

from __future__ import annotations

import json

from pipesight.runs.reading.run import open_run
from support import warm

STOPPED = """
import os, subprocess, sys, time, pipesight
with pipesight.observe(sys.argv[1]):
    script = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 0.6; kill -CONT {os.getpid()}"
    subprocess.run(["/bin/sh", "-c", script], check=True)
    time.sleep(0.3)
"""


def test_a_stopped_process(run):
    """SIGSTOP leaves an instant of about the time until SIGCONT."""
    ended = warm.run("-c", STOPPED, str(run))
    assert ended.returncode == 0, ended.stderr
    with open_run(run) as opened:
        points = opened.points()
    stops = [json.loads(text)["microseconds"] for text in points.values[points.name == "process stopped"]]
    assert max(stops) >= 500_000
