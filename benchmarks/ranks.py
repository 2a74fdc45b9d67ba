"""Training steps of `torch.distributed.pipelining`: one gloo process a stage, led by rank 0."""

import itertools
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.job import Job
from benchmarks.steps import build_workload

__all__ = ["Leader", "Stage", "broadcast", "follow", "gather_norms", "pin"]

# What rank 0 broadcasts is a number of steps to run, or one of these.
CLOSE = 0
GRADIENT_NORMS = -1


def pin(rank: int) -> None:
    """Keep a rank, and the threads that it starts from now on, on a core of its own.

    Linux likes to wake the receiver of a message on the core of its sender. Two ranks that compute right after a
    message then share that core, for most of a step or all of it, while another one is idle.
    """
    cores = sorted(os.sched_getaffinity(0))
    if rank < len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def join(job: Job, rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=job.partitions)


class Stage:
    """One rank's share of the model, and the schedule that runs it."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        workload = build_workload(job)
        self.input, self.target = workload.input, workload.target
        balance = job.balance(len(workload.model))
        start = sum(balance[:rank])
        layers = list(workload.model.children())
        before = nn.Sequential(*layers[:start])
        self.layers = nn.Sequential(*layers[start : start + balance[rank]])
        # Shapes given beforehand: else a hidden first forward runs on uninitialised memory.
        with torch.no_grad():
            x = before(self.input.chunk(job.chunks)[0])
            y = self.layers(x)
        # These say too between which stages gradients travel.
        x.requires_grad_(rank > 0)
        y.requires_grad_()
        stage = pipelining.PipelineStage(
            self.layers, rank, job.partitions, torch.device(job.device), input_args=(x,), output_args=(y,)
        )
        # The loss carries the 1 / chunks itself, which spares this peer a pass over its gradients.
        self.schedule = getattr(pipelining, job.engine)(stage, job.chunks, loss_fn=self._loss, scale_grads=False)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        dist.barrier()

    def step(self) -> None:
        self.layers.zero_grad(set_to_none=True)
        if self.rank == 0:
            self.schedule.step(self.input)
        elif self.rank == self.job.partitions - 1:
            self.schedule.step(target=self.target, losses=[])
        else:
            self.schedule.step()

    def gradient_norms(self) -> list[float]:
        """Those of all ranks, in the order of the model's parameters, and 0 for the input."""
        return [*gather_norms(self.layers), 0.0]

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) / self.job.chunks


def gather_norms(layers: nn.Module) -> list[float]:
    """Return the norms of all ranks' gradients, in the order of the ranks."""
    mine = [float(p.grad.norm()) for p in layers.parameters() if p.grad is not None]
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return list(itertools.chain.from_iterable(gathered))


def broadcast(number: int) -> int:
    message = torch.tensor([number])
    dist.broadcast(message, src=0)
    return int(message)


class Leader:
    """Rank 0: starts the other ranks, and tells them what it is told."""

    def __init__(self, job: Job) -> None:
        if job.partitions < 2 or not job.backward:
            raise ValueError(f"a schedule must train over several ranks (partitions: {job.partitions})")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.folder = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self.folder.name) / "rendezvous")
        command = [sys.executable, "-m", "benchmarks.contender", job.dumps()]
        self.followers = [
            subprocess.Popen([*command, str(rank), rendezvous], stdin=subprocess.PIPE)
            for rank in range(1, job.partitions)
        ]
        join(job, 0, rendezvous)
        self.stage = Stage(job, 0)

    def run(self, steps: int) -> None:
        broadcast(steps)
        self.stage.run(steps)

    def gradient_norms(self) -> list[float]:
        broadcast(GRADIENT_NORMS)
        return self.stage.gradient_norms()

    def close(self) -> None:
        broadcast(CLOSE)
        for follower in self.followers:
            follower.wait()
        dist.destroy_process_group()
        self.folder.cleanup()


def follow(job: Job, rank: int, rendezvous: str) -> None:
    """Run what rank 0 asks for until it says to close, or is gone."""
    threading.Thread(target=exit_with_leader, daemon=True).start()
    join(job, rank, rendezvous)
    stage = Stage(job, rank)
    while (number := broadcast(CLOSE)) != CLOSE:
        if number == GRADIENT_NORMS:
            stage.gradient_norms()
        else:
            stage.run(number)
    dist.destroy_process_group()


def exit_with_leader() -> None:
    # The pipe closes however rank 0 ends, a kill included.
    sys.stdin.read()
    os._exit(1)
