"""A rank of the benchmark `distributed`: two engines in the same processes, which take turns at the same batch.

torchrun starts two of these. Rank 0 times the turns, and writes all of them to a file at the end:

    {"steps": 12, "turns": {"pipelining": [{"seconds": ..., "cpu_seconds": ..., "peak_bytes": 0}, ...], ...}}
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness import PATIENCE_SECONDS, Turn, differ, progress
from benchmarks.job import Job
from benchmarks.models import Loop, Trained
from benchmarks.ranks import Stage, broadcast, gather_norms, pin
from benchmarks.steps import build_workload
from pipesight.distributed import DistributedPipeline, init_process_group
from pipesight.recording import observe

__all__ = ["ANY_MODEL", "BARE", "BARE_OBSERVED", "OBSERVED", "OURS", "Plan"]

BARE, OURS, OBSERVED = "pipelining", "pipesight", "pipesight, observed"
BARE_OBSERVED = "pipelining, observed"
ANY_MODEL = "pipesight, cut as it is"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, as a record that crosses to the ranks as JSON."""

    schedule: str
    """A class of torch.distributed.pipelining."""
    workload: str
    sizes: dict[str, int]
    chunks: int
    rounds: int
    turn_seconds: float
    warm_seconds: float
    folder: str
    """Where recordings and the answer go."""

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main(plan: Plan) -> None:
    torch.set_num_threads(1)
    pin(int(os.environ["RANK"]))
    init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    rank = dist.get_rank()
    engines = build(plan, rank)
    numbers = itertools.count()

    def recording(name: str) -> contextlib.AbstractContextManager[object]:
        if name not in (OBSERVED, BARE_OBSERVED):
            return contextlib.nullcontext()
        # All ranks take the same turns, so they count alike.
        return observe(Path(plan.folder) / f"run-{next(numbers)}", logs=None)

    for step in engines.values():
        timed(step, 2)
    seconds = timed(engines[BARE], 2).seconds
    steps = agreed(plan.turn_seconds / seconds)
    # Longer than a trace's interval, so that the writer is at work.
    warm = agreed(plan.warm_seconds / seconds)
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    order = random.Random(0)
    for number in range(plan.rounds):
        for name in order.sample(list(engines), len(engines)):
            with recording(name):
                timed(engines[name], warm)
                turns[name].append(timed(engines[name], steps))
        if rank == 0:
            progress(f"round {number + 1} of {plan.rounds}")
    if rank == 0:
        progress("")
        listed = {name: [dataclasses.asdict(turn) for turn in mine] for name, mine in turns.items()}
        Path(plan.folder, "answer.json").write_text(json.dumps({"steps": steps, "turns": listed}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def build(plan: Plan, rank: int) -> dict[str, Callable[[], None]]:
    """Return a training step of each contender; both engines have parameters of their own, of equal values.

    Steps end with an optimizer, since recordings count by it. It changes nothing, so that all do the same for ever.
    """
    job = Job(
        engine=plan.schedule,
        workload=plan.workload,
        sizes=plan.sizes,
        partitions=dist.get_world_size(),
        chunks=plan.chunks,
    )
    stage = Stage(job, rank)
    workload = build_workload(job)
    balance = job.balance(len(workload.model))
    if plan.workload == "gpt":
        pipeline = DistributedPipeline(
            Trained(Loop(workload.model)),
            cuts=[f"model.blocks.{sum(balance[:j]) - 1}" for j in range(1, len(balance))],  # the embedding is no block
            chunks=plan.chunks,
            schedule=plan.schedule,
            loss=lambda output: output,
            timeout=PATIENCE_SECONDS,
        )
    else:
        pipeline = DistributedPipeline(
            workload.model,
            balance,
            chunks=plan.chunks,
            schedule=plan.schedule,
            loss_fn=F.mse_loss,
            timeout=PATIENCE_SECONDS,
        )
    theirs = torch.optim.SGD(stage.layers.parameters(), lr=0.0)
    ours = torch.optim.SGD(pipeline.parameters(), lr=0.0)

    def bare() -> None:
        stage.step()
        theirs.step()

    def piped() -> None:
        pipeline.module.zero_grad(set_to_none=True)
        pipeline.step(workload.input, workload.target)
        ours.step()

    bare()
    piped()
    wrong = differ(gather_norms(pipeline.module), gather_norms(stage.layers))
    if wrong is not None:
        raise RuntimeError(f"both engines must compute the same gradients ({wrong})")
    if plan.workload == "gpt":
        return {BARE: bare, ANY_MODEL: piped}
    return {BARE: bare, BARE_OBSERVED: bare, OURS: piped, OBSERVED: piped}


def agreed(steps: float) -> int:
    """Return what rank 0 says, as a number of steps."""
    return broadcast(max(1, math.ceil(steps)))


def timed(step: Callable[[], None], steps: int) -> Turn:
    """Time steps of all ranks, from when all are there to when all are done."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    dist.barrier()
    return Turn((time.perf_counter() - begin) / steps, 0, (time.process_time() - cpu) / steps)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
