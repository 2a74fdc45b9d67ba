"""A job of four ranks, two partitions by two replicas, that is slowed in a known way in each of its runs.

Its layers sleep, so that ranks may share processors. Each run is recorded in a folder of its own, by the number of the
run; `stragglers` reads them.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

import pipesight
from pipesight.distributed import DistributedPipeline, init_process_group

__all__ = ["CAUSES", "Injected"]

CAUSES = ("slow rank", "slow link", "long stage", "slow loader", "uneven sequences", "paused process")
STAGES = REPLICAS = 2
CHUNKS, STEPS, ROWS = 4, 12, 2  # rows of a micro-batch
FORWARD, BACKWARD = 0.008, 0.016  # seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Injected:
    """What slows a run, and where."""

    cause: str | None
    rank: int
    much: float

    @classmethod
    def of_run(cls, number: int, causes: int) -> "Injected":
        """Draw what a run has: the first ``causes`` runs have one each."""
        dice = random.Random(number)
        cause = CAUSES[number % len(CAUSES)] if number < causes else None
        return cls(cause, dice.randrange(STAGES * REPLICAS), dice.uniform(1.5, 2.0))


now = Injected(None, 0, 1.0)
"""What the layers of this process are to do."""


class Sleep(torch.autograd.Function):
    """Passes samples on after as long as they are said to take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: int) -> Tensor:
        ctx.length = _length(x) if type(x) is Tensor else 0.0
        ctx.stage = stage
        time.sleep(_seconds(FORWARD, stage, ctx.length) if type(x) is Tensor else 0.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(_seconds(BACKWARD, ctx.stage, ctx.length))
        return gradients[0], None


def _length(x: Tensor) -> float:
    """Return how many times as long as others these samples take: it is in their first column."""
    return float(x[:, 0].mean())


def _seconds(usual: float, stage: int, length: float) -> float:
    seconds = usual * length
    if now.cause == "slow rank" and dist.get_rank() == now.rank:
        seconds *= now.much
    if now.cause == "long stage" and stage == now.rank % STAGES:
        seconds *= now.much
    return seconds


class Layer(nn.Module):
    """Sleeps, and has a parameter."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.stage)  # type: ignore[no-any-return,no-untyped-call]


class Samples(Dataset[Tensor]):
    """Samples whose first number says how long they take."""

    def __init__(self, number: int, replica: int) -> None:
        dice = random.Random(f"{number} {replica}")
        self._lengths = [
            0.6 + 2.5 * dice.random() ** 4 if now.cause == "uneven sequences" else 1.0 for _ in range(STEPS * CHUNKS)
        ]

    def __len__(self) -> int:
        return STEPS * CHUNKS * ROWS

    def __getitem__(self, index: int) -> Tensor:
        if now.cause == "slow loader" and dist.get_rank() == now.rank and index % (CHUNKS * ROWS) == 0:
            time.sleep(FORWARD * 10 * now.much)
        return torch.full((4,), self._lengths[index // ROWS])


class Late:
    """A message that comes late."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for it, and some more if its link is slow."""
        self._work.wait()
        if now.cause == "slow link" and dist.get_rank() % REPLICAS == now.rank % REPLICAS:
            time.sleep(FORWARD * now.much)


def _pause() -> None:
    """Let this process be stopped for a while, from outside."""
    script = f"kill -STOP {os.getpid()}; sleep {0.4 * now.much}; kill -CONT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)


def run(number: int, causes: int, folder: Path, mesh: Any) -> None:
    """Train a few steps with what slows this run."""
    global now
    now = Injected.of_run(number, causes)
    replica = mesh.get_local_rank("dp")
    pipeline = DistributedPipeline(
        nn.Sequential(*(Layer(stage) for stage in range(STAGES))),
        [1] * STAGES,
        loss_fn=lambda output, _: output.square().mean(),
        chunks=CHUNKS,
        schedule="1f1b",
        mesh=mesh,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.0)
    with pipesight.observe(folder / f"run-{number}", overwrite=True):
        for step, batch in enumerate(DataLoader(Samples(number, replica), batch_size=CHUNKS * ROWS)):
            if now.cause == "paused process" and dist.get_rank() == now.rank and step == STEPS // 2:
                _pause()
            optimizer.zero_grad()
            pipeline.step(batch, batch)
            optimizer.step()
    if dist.get_rank() == 0:
        (folder / f"run-{number}.json").write_text(json.dumps(dataclasses.asdict(now)))


def main() -> None:
    """Make the runs that are asked for, in one job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--causes", type=int, required=True, help="how many of all runs, the first, are slowed")
    parser.add_argument("numbers", type=int, nargs="+", help="of the runs to make")
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_process_group("gloo")
    receive = dist.irecv
    dist.irecv = lambda *arguments, **more: Late(receive(*arguments, **more))  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    for number in options.numbers:
        run(number, options.causes, options.folder, mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
