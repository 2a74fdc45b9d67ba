"""Runs that grow under the eyes of a test: made up step by step, or recorded by a process that does as it is told."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from support.processes import STRICT_PYTHON
from support.synthetic import Made

LIMIT = 120  # seconds; what is waited for comes much sooner, on any machine that is not stuck

T = TypeVar("T")


def wait_for(look: Callable[[], T], *, limit: float = LIMIT) -> T:
    """Look again and again until there is something, and return it."""
    until = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return found


class GrowingRun(Made):
    """A run directory that is written as a run would write it: the trace by gzip members, the rest by lines.

    ::

        run = GrowingRun(tmp_path / "run", balance=[1, 1], chunks=2).begin()
        run.step()
        run.end()
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.description.update(pid=os.getpid(), host=os.uname().nodename, ended=None, outcome=None)
        self.steps = 0
        self._written: dict[int, int] = {}
        self._at = 0

    def begin(self) -> GrowingRun:
        """Make the folder and its run.json."""
        for name in ("trace", "stats", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.describe()
        return self

    def describe(self, **facts: Any) -> None:
        """Write run.json, with some facts changed."""
        self.description.update(facts)
        partial = self.folder / ".run.json"
        partial.write_text(json.dumps(self._run()))
        partial.replace(self.folder / "run.json")

    def trace_of(self, rank: int = 0) -> Path:
        restart = self.description.get("restart")
        return self.folder / (f"trace/rank-{rank:05}" + (f"-restart-{restart}" if restart else "") + ".pfw.gz")

    def step(self, *, task: int = 1000, ranks: int = 1, write: bool = True) -> int:
        """Do one step, each task as long as said, a pause of one task after it; return its number."""
        layers = [f"l{k}" for k in range(sum(self.balance))]
        first = [sum(self.balance[:j]) for j in range(len(self.balance))]
        for rank in range(ranks):
            end = self.gpipe(
                self.steps,
                lambda phase, i, j: task,
                at=self._at,
                rank=rank,
                layers=lambda j: layers[first[j] : first[j] + self.balance[j]],
            )
            self.span("compute", "step", begin=end, dur=task // 2, rank=rank)
        self._at = end + task
        self.steps += 1
        if write:
            self.flush()
        return self.steps - 1

    def flush(self) -> None:
        """Append what is new."""
        for rank, events in self.events.items():
            written = self._written.get(rank, 0)
            lines = [json.dumps(event, separators=(",", ":")) for event in events[written:]]
            self.append("\n".join(["[", *lines] if written == 0 else lines) + "\n", rank=rank)
            self._written[rank] = len(events)

    def append(self, text: str, *, rank: int = 0) -> None:
        """Append a gzip member to the trace."""
        with self.trace_of(rank).open("ab") as file:
            file.write(gzip.compress(text.encode(), mtime=0))

    def say(self, line: str, *, rank: int = 0) -> None:
        """Append a log line."""
        with (self.folder / f"logs/rank-{rank:05}.log").open("a") as file:
            file.write(line + "\n")

    def measure(self, **entry: Any) -> None:
        """Append a line of statistics."""
        with (self.folder / "stats/rank-00000.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def end(self, outcome: str = "ok") -> None:
        """Close the traces, and say so in run.json."""
        for rank in self.events:
            self.append("]\n", rank=rank)
        self.describe(ended="2023-11-14T22:14:20+00:00", outcome=outcome)


RECORD = """
import json, os, sys
import pipesight.trace
from pipesight.trace import ai
folder = sys.argv[1]
facts = {"format": "pipesight-run", "format_version": 1, "pid": os.getpid(), "host": os.uname().nodename,
         "started": "2023-11-14T22:13:20+00:00", "ended": None, "outcome": None}
def describe(**more):
    facts.update(more)
    with open(folder + "/.run.json", "w") as file:
        json.dump(facts, file)
    os.replace(folder + "/.run.json", folder + "/run.json")
os.makedirs(folder)
describe()
session = pipesight.trace.start(folder + "/trace/rank-00000", interval=3600)
serial = 0
for command in sys.stdin:
    if command == "step\\n":
        serial += 1
        for node in (ai.compute.forward, ai.compute.backward):
            for i in range(2):
                where = {"step": serial - 1, "minibatch": serial, "partition": 0, "microbatch": i}
                with node(args=where):
                    pass
        session.flush()
        print("done", flush=True)
session.stop()
describe(ended="2023-11-14T22:14:20+00:00", outcome="ok")
"""


class Recorder:
    """A process that records a run by `pipesight.trace`, a step whenever it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def step(self) -> None:
        """Let it do a step, and wait until that is on disk."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def end(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(LIMIT) == 0

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(LIMIT)


@contextmanager
def recorder(folder: Path) -> Iterator[Recorder]:
    """Start such a process."""
    command = [*STRICT_PYTHON, "-c", RECORD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Recorder(process)
        finally:
            process.kill()
