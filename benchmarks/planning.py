"""The planner: 1,024 stages by 8,192 micro-batches against a plain loop over tasks, and how well it predicts a run.

Each schedule is made and simulated in a process of its own, so that its memory can be seen.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import Options
from benchmarks.tables import Cell, Spread, Table, publish, show_limit
from pipesight.plan import Schedule, gpipe, interleaved, measure, one_f_one_b, recomputed, simulate, zero_bubble
from pipesight.schedule.argument_checks import CheckpointMode

__all__ = ["run"]

STAGES, CHUNKS = 1024, 8192
LIMIT_SECONDS = 10.0
LIMIT_ERROR = 0.05
STEPS = 10_000

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda stages, chunks: interleaved(stages, chunks, devices=stages // 8),
    "zero-bubble": zero_bubble,
    "recomputing": lambda stages, chunks: gpipe(stages, chunks, recompute=recomputed("except_last", chunks)),
}
TIMES = np.array([1.0, 1.0, 2.0, 1.0])[:, None, None]


def run(options: Options) -> bool:
    """Measure; return whether all went well."""
    rounds = 1 if options.quick else options.rounds(5)
    sound = large(rounds)
    small(rounds)
    return predicted(options) and sound


def large(rounds: int) -> bool:
    """Simulate schedules of millions of tasks."""
    loop = statistics.median(plain(gpipe(64, 256)) for _ in range(rounds))
    rows: list[list[Cell]] = []
    sound, slowest = True, 0.0
    for name in SCHEDULES:
        turns = [alone(name) for _ in range(rounds)]
        spread, tasks = Spread.over([turn["seconds"] for turn in turns]), int(turns[0]["tasks"])
        cpu = statistics.median(turn["cpu_seconds"] for turn in turns)
        memory = max(turn["peak_bytes"] for turn in turns) / 2**30
        rows.append([name, tasks, spread, cpu, memory, loop * tasks / spread.median])
        slowest = max(slowest, spread.median)
        sound &= all(turn["right"] for turn in turns)
    title = f"{STAGES:,} stages by {CHUNKS:,} micro-batches: making the schedule and simulating it"
    note = f"Rounds: {rounds}. A plain loop in Python takes {loop * 1e6:.2f} µs per task (64 by 256, median)."
    columns = ["schedule", "tasks", "seconds", "seconds of CPU", "GiB at peak", "times as fast as the loop"]
    publish(Table(title, columns, rows, note))
    show_limit("seconds of the slowest schedule", slowest, LIMIT_SECONDS, met=slowest <= LIMIT_SECONDS)
    return sound


def alone(name: str) -> dict[str, float]:
    """Simulate one schedule in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.planning", name]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def once(name: str) -> dict[str, float]:
    begin, busy = time.perf_counter(), time.process_time()
    schedule = SCHEDULES[name](STAGES, CHUNKS)
    found = simulate(schedule, TIMES)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # What is known of them: all stages are equal.
    n, m, rounds = schedule.devices, CHUNKS, STAGES // schedule.devices
    known = {
        "recomputing": (m + n - 1) * 3 + (m - 1),
        "zero-bubble": 4 * m + (n - 1) * 2,
    }.get(name, (rounds * m + n - 1) * 3)
    right = bool(np.isclose(float(found.makespan), known))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tasks": schedule.tasks, "peak_bytes": peak, "right": right}


def plain(schedule: Schedule) -> float:
    """Return the seconds a task that a loop over tasks takes, with times in dictionaries."""
    queues = [[tuple(task) for task in row if task[0] >= 0][::-1] for row in schedule.order.tolist()]
    begin = time.perf_counter()
    free, last = [0.0] * len(queues), schedule.stages - 1
    end: dict[tuple[int, ...], float] = {}
    while any(queues):
        for device, queue in enumerate(queues):
            while queue:
                kind, s, i = queue[-1]
                need = None if (kind, s) == (0, 0) else (0, s - 1, i) if kind == 0 else (2, s + 1, i)
                need = (0, s, i) if kind == 2 and s == last else need
                if need is not None and need not in end:
                    break
                queue.pop()
                free[device] = max(free[device], end[need] if need is not None else 0.0) + 1.0 + kind / 2
                end[kind, s, i] = free[device]
    return (time.perf_counter() - begin) / schedule.tasks


def small(rounds: int) -> None:
    """Simulate a small schedule for many steps at once, as the report does."""
    schedule = gpipe(4, 8, recompute=recomputed("except_last", 8))
    durations = np.random.default_rng(0).random((4, 4, 8, STEPS))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        simulate(schedule, durations)
        times.append(time.perf_counter() - begin)
    row: list[Cell] = [
        f"4 stages by 8 micro-batches, {STEPS:,} steps at once",
        Spread.over([one * 1e3 for one in times]),
    ]
    publish(Table("Many steps of a small schedule, as the report simulates them", ["what", "ms"], [row]))


def predicted(options: Options) -> bool:
    """Record the demo, and compare the step that is simulated with the one that was measured."""
    from pipesight.demo.training import Training, one_thread
    from pipesight.runs.reading.run import open_run
    from pipesight.trace import start

    rows: list[list[Cell]] = []
    worst = 0.0
    steps = 30 if options.quick else 200
    settings: list[tuple[int, int, CheckpointMode]] = [(4, 4, "except_last"), (2, 8, "never"), (4, 8, "always")]
    for partitions, chunks, checkpoint in settings:
        with tempfile.TemporaryDirectory() as folder, one_thread():
            training = Training(partitions=partitions, chunks=chunks, checkpoint=checkpoint, seed=0)
            (Path(folder) / "trace").mkdir()
            with start(Path(folder) / "trace/rank-00000.pfw.gz"):
                for _ in range(steps):
                    training.step()
            with open_run(folder) as run_:
                found = measure(run_)
        error = found.predicted_seconds / found.step_seconds - 1
        worst = max(worst, abs(error))
        what = f"{partitions} partitions, {chunks} chunks, {checkpoint}"
        rows.append([what, found.step_seconds * 1e3, found.predicted_seconds * 1e3, f"{error:+.1%}"])
    columns = ["demo", "ms measured", "ms simulated", "difference"]
    publish(Table("The demo, recorded and simulated: median step", columns, rows, f"{steps} steps each."))
    show_limit("largest difference, %", worst * 100, LIMIT_ERROR * 100, met=worst <= LIMIT_ERROR)
    return True


if __name__ == "__main__":
    print(json.dumps(once(sys.argv[1])))
