"""The cost of a span: recording it, writing it, and not recording it; its bytes on disk, and memory over many.

Spans carry two integer arguments. What is written counts the processor time of all threads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Contender, Options, measure
from benchmarks.job import Job
from benchmarks.recorders import SPANS
from benchmarks.tables import Cell, Goal, Quantity, Table, publish, show, show_goals

__all__ = ["run"]

NANOSECONDS = Quantity("ns per span", lambda turn: turn.seconds * 1e9 / SPANS)
CPU_NANOSECONDS = Quantity("ns of CPU per span", lambda turn: turn.cpu_seconds * 1e9 / SPANS)


def run(options: Options) -> bool:
    """Measure; return whether no contender crashed."""
    names = ["nullcontext", "nullcontext, 8 threads", "pipesight, recording", "pipesight, 8 threads"]
    names += ["pipesight, disabled", "dftracer"]
    outcomes = measure(
        [contender(options, name) for name in names], rounds=options.rounds(15), turn_seconds=options.turn_seconds(0.05)
    )
    sound = show("Recording a span", outcomes, reference="nullcontext", kind="cost", quantity=NANOSECONDS)
    goals = [
        Goal("pipesight, recording", "nullcontext", "cost", 3.5),
        Goal("pipesight, recording", "dftracer", "cost", 0.10),
        Goal("pipesight, disabled", "nullcontext", "cost", 1.5),
        Goal("pipesight, 8 threads", "pipesight, recording", "cost", 1.0),
        Goal("nullcontext, 8 threads", "nullcontext", "cost", 1.0),  # what the interpreter's lock alone costs
    ]
    show_goals(outcomes, goals, NANOSECONDS)
    names = ["nullcontext", "pipesight", "dftracer", "viztracer"]
    outcomes = measure(
        [contender(options, name) for name in names], rounds=options.rounds(11), turn_seconds=options.turn_seconds(0.2)
    )
    sound &= show("Recording and writing", outcomes, reference="dftracer", kind="cost", quantity=CPU_NANOSECONDS)
    goals = [Goal("pipesight", "dftracer", "cost", 0.25), Goal("pipesight", "viztracer", "cost", 1.0)]
    show_goals(outcomes, goals, CPU_NANOSECONDS)
    spans = 100_000 if options.quick else 1_000_000
    rows: list[list[Cell]] = []
    for name in ("pipesight", "dftracer"):
        if (python := interpreter(options, name)) is not None:
            what = f"bytes per span on disk, {name}, over {spans:,} spans"
            rows.append([what, float(tell(python, "bytes", name, spans))])
    spans = {"full": 10_000_000, "brief": 3_000_000, "quick": 1_000_000}[options.size]
    memory = tell(Path(sys.executable), "memory", "pipesight", spans)
    rows.append([f"MiB resident after a tenth of {spans:,} spans", round(memory[0])])
    rows.append([f"MiB resident after {spans:,} spans", round(memory[-1])])
    import_seconds()  # compiles
    rows.append(["ms to import pipesight.trace, the quickest of 5", min(import_seconds() for _ in range(5)) * 1e3])
    publish(Table("Size on disk, memory, import", ["what", "figure"], rows))
    return sound


def contender(options: Options, name: str) -> Contender:
    return Contender(name, Job(engine="recorder", workload=name), interpreter(options, name))


def interpreter(options: Options, name: str) -> Path | None:
    return options.peers if name in ("dftracer", "viztracer") else Path(sys.executable)


def tell(python: Path, *arguments: object) -> Any:
    """Ask a process of its own."""
    command = [str(python), "-m", "benchmarks.recorders", *map(str, arguments)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def import_seconds() -> float:
    """Time the import in a new interpreter, less what the interpreter itself takes."""
    program = "import time; t = time.perf_counter(); import pipesight.trace; print(time.perf_counter() - t)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH", "")]))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the first import compiles
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout)
