"""The steps of the benchmark `predictions`, in one process or as a rank: records one setting, times all, records all.

Started by torchrun, the settings run over ranks; else in one process. The first process writes all times to a file:

    {"timed": [{"seconds": [0.412, 0.409, ...]}, ...]}
"""

import contextlib
import copy
import dataclasses
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import PATIENCE_SECONDS, differ, progress
from benchmarks.models import WORKLOADS, Workload
from benchmarks.ranks import broadcast, pin
from pipesight import Pipeline
from pipesight.distributed import DistributedPipeline, init_process_group
from pipesight.plan import Setting
from pipesight.recording import observe

__all__ = ["Case", "Timed"]

Step = Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is run."""

    setting: Setting
    balance: tuple[int, ...]

    @property
    def name(self) -> str:
        setting = self.setting
        rounds = f" x{setting.rounds}" if setting.schedule == "zero-bubble" and setting.rounds > 1 else ""
        balance = " ".join(map(str, self.balance))
        return f"{setting.schedule}{rounds}, {setting.chunks} chunks, {setting.checkpoint}, balance {balance}"


@dataclasses.dataclass(slots=True)
class Timed:
    """Seconds per step, one figure a round."""

    seconds: list[float]


def over_ranks() -> bool:
    return "RANK" in os.environ


def main(asked: dict[str, Any]) -> None:
    rank = start()
    cases = [Case(Setting(**one["setting"]), tuple(one["balance"])) for one in asked["cases"]]
    torch.manual_seed(0)
    workload = WORKLOADS[asked["workload"]](**asked["sizes"])
    steps = [engine(workload, case) for case in cases]
    check(cases, steps)
    folder = Path(asked["folder"])
    record(steps[0], folder / "run", asked["recorded_steps"])
    turns = [agreed(asked["turn_seconds"] / timed(step, 1)) for _, step in steps]
    found = [Timed([]) for _ in steps]
    order = random.Random(0)
    for number in range(asked["rounds"]):
        for k in order.sample(range(len(steps)), len(steps)):
            timed(steps[k][1], 1)
            found[k].seconds.append(timed(steps[k][1], turns[k]))
        if rank == 0:
            progress(f"round {number + 1} of {asked['rounds']}")
    for k, step in enumerate(steps):
        record(step, folder / f"case-{k}", asked["recorded_steps"] if not k else max(4, asked["recorded_steps"] // 2))
    if rank == 0:
        progress("")
        answer = {"timed": [dataclasses.asdict(one) for one in found]}
        (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    if over_ranks():
        dist.barrier()
        dist.destroy_process_group()


def start() -> int:
    """Join the other ranks, if there are any; return the rank."""
    if not over_ranks():
        torch.set_num_threads(os.cpu_count() or 1)  # the workers share them
        return 0
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks <= len(os.sched_getaffinity(0)):
        pin(rank)
    init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    return rank


def engine(workload: Workload, case: Case) -> tuple[nn.Module, Step]:
    """Return a pipeline with parameters of its own, and a training step of it.

    Steps end with an optimizer, since recordings count by it. It changes nothing, so that all do the same for ever.
    """
    model, setting = copy.deepcopy(workload.model), case.setting
    rest: dict[str, Any] = {"schedule": setting.engine_name, "checkpoint": setting.checkpoint, "loss_fn": workload.loss}
    pipe: Any
    if over_ranks():
        pipe = DistributedPipeline(model, balance=case.balance, chunks=setting.chunks, timeout=PATIENCE_SECONDS, **rest)
        module = pipe.module
    else:
        homes = setting.build().device_of_stage
        pipe = Pipeline(model, balance=case.balance, devices=["cpu"] * len(homes), chunks=setting.chunks, **rest)
        module = pipe
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        pipe.step(workload.input, workload.target)
        optimizer.step()

    return module, step


def check(cases: list[Case], steps: list[tuple[nn.Module, Step]]) -> None:
    """Run each twice, and raise unless all have the same gradients."""
    expected: list[float] | None = None
    for case, (module, step) in zip(cases, steps, strict=True):
        step()
        step()
        norms = sorted(gathered([float(p.grad.norm()) for p in module.parameters() if p.grad is not None]))
        expected = norms if expected is None else expected
        if (wrong := differ(norms, expected)) is not None:
            raise RuntimeError(f"all settings must compute the same gradients ({case.name}: {wrong})")


def gathered(mine: list[float]) -> list[float]:
    if not over_ranks():
        return mine
    found: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return [norm for norms in found for norm in norms]


def record(step: tuple[nn.Module, Step], folder: Path, count: int) -> None:
    timed(step[1], 1)
    with observe(folder, logs=None):
        timed(step[1], count)


def agreed(steps: float) -> int:
    """Return a number of steps; that of rank 0, if there are ranks."""
    count = max(1, math.ceil(steps))
    return broadcast(count) if over_ranks() else count


def timed(step: Step, steps: int) -> float:
    """Return the seconds of a step, from when all ranks are there to when all are done."""
    wait = dist.barrier if over_ranks() else contextlib.nullcontext
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
