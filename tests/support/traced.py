"""What the tests of tracing share: programs that record, the tree as it was before, and ways to look at events."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

from pipesight.trace import Node, ai

NAP = 0.02  # seconds
COVERED = NAP * 1e6 * 0.99  # microseconds, with room for a clock that rounds

PREAMBLE = """
import atexit, os, signal, sys, threading, time
from pipesight.trace import ai, start, stop, flush
def record(count, node=ai.compute.step):
    for _ in range(count):
        with node: pass
"""


def record(count: int, node: Node = ai.compute.step) -> None:
    """Record this many spans."""
    for _ in range(count):
        with node:
            pass


def run_code(code: str, *, cwd: Path | None = None, **env: object) -> subprocess.CompletedProcess[str]:
    """Run Python code, with warnings as errors; it must succeed."""
    environment = {**os.environ, **{name: str(value) for name, value in env.items()}}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=60, check=True)


@contextlib.contextmanager
def tree_put_back():
    """Undo the switches and updates of a block."""
    args = {node: node.args for node in ai.subtree()}
    try:
        yield
    finally:
        ai.enable()
        for node in ai.subtree():
            node.args = args.get(node, {})


def names(events):
    return [event["name"] for event in events]


def args_of(event):
    """Return the arguments that are the user's."""
    return {name: value for name, value in event["args"].items() if name not in ("hhash", "p_idx", "level")}


def named(events, name):
    """Return the one event with this name."""
    (event,) = (event for event in events if event["name"] == name)
    return event


def parents(events):
    """Return the name of each event's parent, by the event's name; None where it is the root."""
    by_id = {event["id"]: event["name"] for event in events}
    return {event["name"]: by_id.get(event["args"]["p_idx"]) for event in events}


def levels(events):
    return {event["name"]: event["args"]["level"] for event in events}


def run_threads(n, target):
    """Run ``target(k)`` in n threads that are alive at the same time."""
    together = threading.Barrier(n)

    def run(k):
        together.wait()
        target(k)
        together.wait()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_nesting(events):
    """Check that every span lies in its parent, one level deeper, in its thread, and overlaps no sibling."""
    by_id = {event["id"]: event for event in events}
    assert len(by_id) == len(events)
    children = {}
    for event in events:
        assert event["dur"] >= 0
        parent = by_id.get(event["args"]["p_idx"])
        if parent is None:
            assert (event["args"]["p_idx"], event["args"]["level"]) == (6, 2)
        else:
            assert event["args"]["level"] == parent["args"]["level"] + 1
            assert event["tid"] == parent["tid"]
            assert parent["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= parent["ts"] + parent["dur"]
        children.setdefault((event["tid"], event["args"]["p_idx"]), []).append(event)
    for siblings in children.values():
        siblings.sort(key=lambda event: event["id"])
        for one, other in itertools.pairwise(siblings):
            assert one["ts"] + one["dur"] <= other["ts"]


def check_nested_only(events):
    """Check that every span lies in its parent; siblings of one thread may overlap, as tasks do."""
    by_id = {event["id"]: event for event in events}
    for event in events:
        parent = by_id.get(event["args"]["p_idx"])
        if parent is not None:
            assert parent["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= parent["ts"] + parent["dur"]
            assert event["args"]["level"] == parent["args"]["level"] + 1
