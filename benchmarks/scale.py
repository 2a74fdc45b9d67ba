"""Many partitions in one process: 16 transformer blocks on as many cores, and what holds them.

Processes that run the tasks of one partition each, and wait for nothing, share memory and its bandwidth; threads that
do so share the GIL and malloc, too. A pipeline in one process can at most be what the threads are, one over ranks what
the processes are. To measure other sizes:

    python -m benchmarks.scale 2 8 16 --batch 32 --chunks 32
"""

import argparse
import dataclasses
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Options
from benchmarks.job import Job
from benchmarks.steps import Steps, build_workload
from benchmarks.tables import Cell, Table, publish, show_limit
from pipesight.context import Observer, Where, attach, detach
from pipesight.distributed import DistributedPipeline, init_process_group

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
        tasks = job("tasks", n, batch, chunks)
        for what, took in (
            ("tasks in processes", in_processes(_tasks_alone, tasks, steps)),
            ("tasks in threads", in_threads(tasks, steps)),
        ):
            speed = plain.wall / took.wall * chunks / (n + chunks - 1)
            rows.append([n, what, speed, speed / bound, took.cpu / plain.cpu, None, None, None])
        over_ranks = in_processes(_as_rank, tasks, steps)
        speed = plain.wall / over_ranks.wall
        rows.append([n, "DistributedPipeline 1f1b", speed, speed / bound, over_ranks.cpu / plain.cpu, None, None, None])
        for engine, what in ENGINES.items():
            runner = Steps(job(engine, n, batch, chunks))
            took, (wall, watched) = timed(runner.run, steps), watch(runner, 2)
            speed = plain.wall / took.wall
            inside = [(watched.wall - watched.cpu) / (n * wall), 1 - watched.wall / (n * wall)]
            rows.append(
                [n, what, speed, speed / bound, took.cpu / plain.cpu, *inside, took.switches / (2 * n * chunks)]
            )
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


def in_processes(prepare: Callable[[Job, int, str], Callable[[int], Any]], job: Job, steps: int) -> Cost:
    """Return what a step takes if each partition has a process, in which ``prepare`` makes what runs steps."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.steps", "pipesight.distributed"])
    barrier, answers = server.Barrier(job.partitions), server.SimpleQueue()

    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            (prepare, job, j, steps, str(Path(folder, "store")), barrier, answers) for j in range(job.partitions)
        ]
        begun = [server.Process(target=_be_one, args=each) for each in arguments]
        for process in begun:
            process.start()
        found = [answers.get() for _ in begun]
        for process in begun:
            process.join()
    return Cost(max(wall for wall, _ in found), sum(cpu for _, cpu in found))


def _be_one(prepare: Any, job: Job, j: int, steps: int, store: str, barrier: Any, answers: Any) -> None:
    took = timed(prepare(job, j, store), steps, barrier.wait)
    answers.put((took.wall, took.cpu))
    if dist.is_initialized():
        dist.destroy_process_group()


def _tasks_alone(job: Job, j: int, store: str) -> Callable[[int], None]:
    return tasks_of(job, j)


def _as_rank(job: Job, j: int, store: str) -> Callable[[int], None]:
    """Return what runs steps of a rank of the pipeline."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    init_process_group("gloo", init_method=f"file://{store}", rank=j, world_size=job.partitions)
    workload = build_workload(job)
    balance = job.balance(LAYERS)
    pipe = DistributedPipeline(workload.model, balance, chunks=job.chunks, schedule="1f1b", loss_fn=workload.loss)

    def run(steps: int) -> None:
        for _ in range(steps):
            pipe.module.zero_grad(set_to_none=True)
            pipe.step(workload.input, workload.target)

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure numbers of partitions in one process.")
    parser.add_argument("partitions", nargs="*", type=int, default=PARTITIONS, help="(default: 2 8 16)")
    parser.add_argument("--batch", type=int, default=32, help="samples of 64 tokens a step (default: 32)")
    parser.add_argument("--chunks", type=int, default=32, help="micro-batches a step (default: 32)")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed (default: 3)")
    chosen = parser.parse_args()
    measure(chosen.partitions, batch=chosen.batch, chunks=chosen.chunks, steps=chosen.steps)
