"""A training step on the CPU: 2 partitions on 2 cores, 8 micro-batches, one thread each.

The plain model says what there is to win, torchgpipe and torch.distributed.pipelining what others win of it.
"""

import os

from benchmarks.harness import Contender, Options, measure
from benchmarks.job import SCHEDULES, Job
from benchmarks.tables import Goal, show, show_goals

__all__ = ["run"]

CHUNKS = 8
WHOLE = "plain, whole batch"
ACCUMULATED = "plain, micro-batches"
OURS = "pipesight never"
THEIRS = "torchgpipe never"
STEP = "pipesight step 1f1b"
SPLIT = "pipesight step zero-bubble"

NOTE = (
    f"Two partitions do in {CHUNKS} + 1 turns what takes one of them 2 * {CHUNKS}, so the schedule allows "
    f"{2 * CHUNKS / (CHUNKS + 1):.2f}. Where the plain model with 2 threads is faster, a CPU needs no pipeline."
)

GOALS = [
    Goal(OURS, ACCUMULATED, "speed", 1.60),
    Goal(OURS, WHOLE, "speed", 1.35),
    Goal(OURS, THEIRS, "speed", 1.60),
    Goal(STEP, ACCUMULATED, "speed", 1.70),
    Goal(SPLIT, STEP, "speed", 1.00),
    # No slower than the better of the two is no slower than either.
    *(Goal(OURS, f"pipelining {schedule}", "speed", 1.00) for schedule in SCHEDULES),
]

WORKLOADS = {
    "mlp": "8 x (Linear(512), ReLU), batch 2048",
    "transformer": "8 transformer blocks, dim 256, 4 heads, sequence 64, batch 32",
}


def run(options: Options) -> bool:
    """Measure both models; return whether no contender crashed."""
    if (os.cpu_count() or 1) < 2:
        print("skipped: needs 2 cores")
        return True
    sound = True
    for workload, title in WORKLOADS.items():
        outcomes = measure(
            contenders(options, workload), rounds=options.rounds(11), turn_seconds=options.turn_seconds(0.5)
        )
        sound &= show(f"CPU step: {title}", outcomes, reference=ACCUMULATED, kind="speed", note=NOTE)
        show_goals(outcomes, GOALS)
    return sound


def contenders(options: Options, workload: str) -> list[Contender]:
    """All take the same mini-batch, and all but the plain model on the whole batch the same micro-batches."""

    def job(engine: str, threads: int = 1, partitions: int = 1, checkpoint: str = "never") -> Job:
        return Job(
            engine=engine,
            workload=workload,
            partitions=partitions,
            chunks=CHUNKS,
            checkpoint=checkpoint,
            threads=threads,
        )

    jobs = {
        ACCUMULATED: job("accumulated"),
        WHOLE: job("whole"),
        f"{WHOLE}, 2 threads": job("whole", threads=2),
        # pipesight shares the process's threads out among its workers: 2 are one for each.
        OURS: job("pipesight", threads=2, partitions=2),
        STEP: job("step 1f1b", threads=2, partitions=2),
        SPLIT: job("step zero-bubble", threads=2, partitions=2),
        THEIRS: job("torchgpipe", partitions=2),
        f"{THEIRS}, 2 threads": job("torchgpipe", threads=2, partitions=2),
    }
    jobs |= {f"pipelining {schedule}": job(schedule, partitions=2) for schedule in SCHEDULES}
    for checkpoint in ("except_last", "always"):
        jobs |= {
            f"pipesight {checkpoint}": job("pipesight", 2, 2, checkpoint),
            f"torchgpipe {checkpoint}": job("torchgpipe", 1, 2, checkpoint),
        }
    return [options.contender(name, job) for name, job in jobs.items()]
