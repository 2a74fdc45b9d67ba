"""The network that tests use: nothing of it stays. That it delays and loses packets, test_network of ranks shows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.network import Link, two_hosts


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_stays(killed, tmp_path):
    """At the end the hosts are gone, with the programs on them, also if the tests were killed."""
    begin = f"""
import subprocess, sys, time
from support.network import Link, two_hosts
with two_hosts(Link()) as hosts:
    left = [subprocess.Popen(host.command(["sleep", "1000"])) for host in hosts]
    time.sleep(0.5)
    print(*(host.namespace for host in hosts), *(process.pid for process in left), flush=True)
    if {killed}:
        time.sleep(1000)
for process in left:
    process.wait()
"""
    with two_hosts(Link()):
        pass  # skips where there are none
    with subprocess.Popen(
        [sys.executable, "-c", begin], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    ) as job:
        *namespaces, first, second = job.stdout.readline().split()
        if killed:
            job.send_signal(signal.SIGKILL)
    assert job.returncode == (-signal.SIGKILL if killed else 0)
    until = time.monotonic() + 30
    there = ["the first look"]
    while there and time.monotonic() < until:
        time.sleep(0.1)
        there = [name for name in namespaces if os.path.exists(f"/run/netns/{name}")]
        there += [pid for pid in (first, second) if alive(pid)]
    assert there == []


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
