"""Many partitions in one process: 16 transformer blocks on as many cores, and what holds them.

Each row can at most be what the one above it is. Processes that run the tasks of one partition each, and wait for
nothing, share memory and its bandwidth; threads that do so share the GIL and malloc, too; in a pipeline they also wake
each other up. To measure other sizes:

    python -m benchmarks.scale 2 8 16 --batch 32 --chunks 32
"""

import argparse
import dataclasses
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from benchmarks.harness import Options
from benchmarks.job import Job
from benchmarks.steps import Steps, build_workload
from benchmarks.tables import Cell, Table, publish, show_limit
from pipesight.context import Observer, Where, attach, detach

__all__ = ["run"]

LAYERS = 16
PARTITIONS = [2, 8, 16]
SHARE = 0.75  # of what the schedule allows
ENGINES = {"pipesight": "GPipe call", "step 1f1b": "step 1f1b"}
COLUMNS = ["partitions", "what", "speed", "of the bound", "CPU / plain", "off CPU", "between tasks", "switches"]
NOTE = (
    "Speed: of a step, against the plain model fed the same micro-batches on one core; where there is no pipeline, "
    "with the idle time that the schedule would add. Off CPU: tasks that wait for the GIL or a core, a share of all "
    "cores' time. Between tasks: idle by the schedule, or waiting for a task. Switches: a thread waits, per task."
)


@dataclasses.dataclass
class Cost:
    """What something took, in seconds."""

    wall: float = 0.0
    cpu: float = 0.0
    switches: float = 0.0

    @classmethod
    def now(cls, who: int) -> "Cost":
        used = resource.getrusage(who)
        return cls(time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_nvcsw)

    def since(self, begin: "Cost", times: int = 1) -> "Cost":
        pairs = zip(dataclasses.astuple(begin), dataclasses.astuple(self), strict=True)
        return Cost(*((b - a) / times for a, b in pairs))


class TaskCosts(Observer):
    """Adds up what tasks take, in their threads."""

    def __init__(self) -> None:
        self.total = Cost()
        self._here = threading.local()
        self._adding = threading.Lock()

    def task_started(self, where: Where) -> None:
        self._here.begin = Cost.now(resource.RUSAGE_THREAD)

    def task_ended(self, where: Where) -> None:
        took = Cost.now(resource.RUSAGE_THREAD).since(self._here.begin)
        with self._adding:
            self.total.wall += took.wall
            self.total.cpu += took.cpu


def run(options: Options) -> bool:
    """Measure as many partitions as there are cores for."""
    cores = len(os.sched_getaffinity(0))
    measure([n for n in PARTITIONS if n <= cores], batch=32, chunks=32, steps=1 if options.quick else 3)
    return True


def measure(partitions: list[int], *, batch: int, chunks: int, steps: int) -> None:
    """Measure numbers of partitions, and print a table."""
    plain = timed(Steps(job("accumulated", 1, batch, chunks)).run, 2)
    rows: list[list[Cell]] = [[1, "plain", 1.0, None, 1.0, None, None, None]]
    limits = []
    for n in partitions:
        bound = n * chunks / (n + chunks - 1)
        for what, independent in (("tasks in processes", in_processes), ("tasks in threads", in_threads)):
            took = independent(job("tasks", n, batch, chunks), steps)
            speed = plain.wall / took.wall * chunks / (n + chunks - 1)
            rows.append([n, what, speed, speed / bound, took.cpu / plain.cpu, None, None, None])
        for engine, what in ENGINES.items():
            runner = Steps(job(engine, n, batch, chunks))
            took, (wall, watched) = timed(runner.run, steps), watch(runner, 2)
            speed, tasks = plain.wall / took.wall, 2 * n * chunks
            inside = [(watched.wall - watched.cpu) / (n * wall), 1 - watched.wall / (n * wall)]
            rows.append([n, what, speed, speed / bound, took.cpu / plain.cpu, *inside, took.switches / tasks])
            limits.append((f"{what}, {n} partitions, speed", speed, SHARE * bound))
    cores = len(os.sched_getaffinity(0))
    title = f"Scale: {LAYERS} blocks of 256, {chunks} micro-batches of {batch // chunks} x 64 tokens, {cores} cores"
    publish(Table(title, COLUMNS, rows, NOTE))
    for what, speed, least in limits:
        show_limit(what, speed, least, met=speed >= least, least=True)


def job(engine: str, n: int, batch: int, chunks: int) -> Job:
    torch.set_num_threads(n)  # pipesight shares them out among its workers
    sizes = {"layers": LAYERS, "batch": batch}
    return Job(engine=engine, workload="transformer", sizes=sizes, partitions=n, chunks=chunks)


def timed(steps: Callable[[int], Any], count: int, warm: Callable[[], Any] = int) -> Cost:
    """Return what a step takes, after one that is not counted; ``warm`` waits until others have run theirs, too."""
    steps(1)
    warm()
    begin = Cost.now(resource.RUSAGE_SELF)
    steps(count)
    return Cost.now(resource.RUSAGE_SELF).since(begin, count)


def watch(runner: Steps, count: int) -> tuple[float, Cost]:
    """Return what steps take, and what their tasks do, which is measured in the tasks."""
    observer = TaskCosts()
    attach(observer)
    try:
        begin = time.perf_counter()
        runner.run(count)
        return time.perf_counter() - begin, observer.total
    finally:
        detach(observer)


def tasks_of(job: Job, j: int) -> Callable[[int], None]:
    """Return what runs the tasks of a partition, which waits for nothing."""
    workload = build_workload(job)
    share = LAYERS // job.partitions
    layers = workload.model[j * share : (j + 1) * share]
    inputs = [x.detach().requires_grad_(j > 0) for x in workload.input.chunk(job.chunks)]
    gradient = torch.full_like(inputs[0], 1e-6)

    def run(steps: int) -> None:
        torch.set_num_threads(1)
        for _ in range(steps):
            layers.zero_grad(set_to_none=True)
            for x in inputs:
                x.grad = None
                torch.autograd.backward(layers(x), gradient)

    return run


def in_threads(job: Job, steps: int) -> Cost:
    """Return what a step takes if each partition has a thread."""
    runs = [tasks_of(job, j) for j in range(job.partitions)]

    def together(count: int) -> None:
        threads = [threading.Thread(target=run, args=(count,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(together, steps)


def in_processes(job: Job, steps: int) -> Cost:
    """Return what a step takes if each partition has a process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.steps"])
    barrier, answers = server.Barrier(job.partitions), server.SimpleQueue()
    begun = [server.Process(target=_be_one, args=(job, j, steps, barrier, answers)) for j in range(job.partitions)]
    for process in begun:
        process.start()
    found = [answers.get() for _ in begun]
    for process in begun:
        process.join()
    return Cost(max(wall for wall, _ in found), sum(cpu for _, cpu in found))


def _be_one(job: Job, j: int, steps: int, barrier: Barrier, answers: Any) -> None:
    took = timed(tasks_of(job, j), steps, barrier.wait)
    answers.put((took.wall, took.cpu))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure numbers of partitions in one process.")
    parser.add_argument("partitions", nargs="*", type=int, default=PARTITIONS, help="(default: 2 8 16)")
    parser.add_argument("--batch", type=int, default=32, help="samples of 64 tokens a step (default: 32)")
    parser.add_argument("--chunks", type=int, default=32, help="micro-batches a step (default: 32)")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed (default: 3)")
    chosen = parser.parse_args()
    measure(chosen.partitions, batch=chosen.batch, chunks=chosen.chunks, steps=chosen.steps)
