"""One contender's process: builds its model once, then runs steps whenever a line asks for them.

    contender -> harness   {"gradient_norms": [...]} once it is ready
    harness -> contender   the number of steps
    contender -> harness   {"seconds": ..., "cpu_seconds": ..., "peak_bytes": ...}

It runs on a peer's interpreter too, which has no pipesight: packages are imported where they are used.
"""

import json
import os
import sys
import time

import torch

from benchmarks.job import SCHEDULES, Job
from benchmarks.steps import Runner, Steps

__all__ = ["main"]


def main() -> None:
    job = Job.loads(sys.argv[1])
    torch.set_num_threads(job.threads)
    if len(sys.argv) > 2:
        from benchmarks.ranks import follow

        follow(job, int(sys.argv[2]), sys.argv[3])
        return
    # Answers go to the real stdout; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    runner = build(job)
    for _ in range(2):
        runner.run(1)
    print(json.dumps({"gradient_norms": runner.gradient_norms()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(runner, job, int(line))), file=answers, flush=True)
    runner.close()


def build(job: Job) -> Runner:
    if job.engine in SCHEDULES:
        from benchmarks.ranks import Leader

        return Leader(job)
    if job.engine == "recorder":
        from benchmarks.recorders import Recorder

        return Recorder(job.workload)
    if job.engine == "statistics":
        from benchmarks.loggers import Logger

        return Logger(job.workload)
    if job.workload == "gpt2":
        from benchmarks.gpt2 import Training

        return Training(job)
    return Steps(job)


def turn(runner: Runner, job: Job, steps: int) -> dict[str, float]:
    """Time steps after one more that is not timed, for it finds caches and clocks gone cold."""
    cuda = job.device.startswith("cuda")
    runner.run(1)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start, cpu_start = time.perf_counter(), time.process_time()
    runner.run(steps)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "seconds": seconds / steps,
        "cpu_seconds": cpu_seconds / steps,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }


if __name__ == "__main__":
    main()
