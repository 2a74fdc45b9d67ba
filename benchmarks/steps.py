"""Training steps of one process: the plain model, and the packages that have a `GPipe`."""

import importlib
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from benchmarks.job import PIPELINES, Job, require_original
from benchmarks.models import WORKLOADS, Loop, Workload

__all__ = ["Runner", "Steps", "build_workload"]


class Runner(Protocol):
    """Something that runs training steps and returns when their work is done."""

    def run(self, steps: int) -> None: ...

    def gradient_norms(self) -> list[float]: ...

    def close(self) -> None: ...


def build_workload(job: Job) -> Workload:
    """Make the same parameters and the same mini-batch in every contender of one machine."""
    torch.manual_seed(0)
    with torch.device(job.device):
        return WORKLOADS[job.workload](**job.sizes)


class Steps:
    """Steps in this process: reset the gradients, then forward, loss and backward."""

    def __init__(self, job: Job) -> None:
        self.job = job
        workload = build_workload(job)
        self.input, self.target = workload.input, workload.target
        self.model: nn.Module = workload.model
        self.loss = workload.loss
        self.step = self._whole
        if job.engine in PIPELINES:
            self.model = wrap(job, workload.model)
        elif job.engine.startswith("step "):
            self.model = wrap_for_steps(job, workload)
            self.step = self._stepped
        elif job.engine == "any_model":
            self.model = wrap_loop(job, Loop(workload.model))
        elif job.engine == "accumulated":
            self.step = self._accumulated
        elif job.engine != "whole":
            raise ValueError(f"engine must be known (engine: {job.engine})")
        # Leaves of their own: slices of one leaf would each write a gradient of the whole batch.
        self.inputs = [x.detach().requires_grad_(self.input.requires_grad) for x in self._chunks(self.input)]
        self.targets = self._chunks(self.target)

    def run(self, steps: int) -> None:
        step: Callable[[], None] = self.step if self.job.backward else self._forward
        for _ in range(steps):
            step()
        if self.job.device.startswith("cuda"):
            torch.cuda.synchronize()

    def gradient_norms(self) -> list[float]:
        """One for each parameter, then one for the input, which may have been cut into leaves."""
        norms = [float(p.grad.float().norm()) for p in self.model.parameters() if p.grad is not None]
        leaves = [float(x.grad.norm()) for x in [self.input, *self.inputs] if x.grad is not None]
        return [*norms, math.hypot(*leaves)]

    def close(self) -> None:
        """Nothing to end: the process ends with its work."""

    def _chunks(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.detach().chunk(self.job.chunks))

    def _reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for x in [self.input, *self.inputs]:
            x.grad = None

    def _whole(self) -> None:
        self._reset()
        torch.autograd.backward(self.loss(self.model(self.input), self.target))

    def _accumulated(self) -> None:
        self._reset()
        for x, target in zip(self.inputs, self.targets, strict=True):
            torch.autograd.backward(self.loss(self.model(x), target) / self.job.chunks)

    def _stepped(self) -> None:
        self._reset()
        step: Callable[..., torch.Tensor] = self.model.step  # type: ignore[assignment]
        step(self.input, self.target)

    @torch.no_grad()
    def _forward(self) -> None:
        if self.job.engine == "accumulated":
            for x in self.inputs:
                self.model(x)
        else:
            self.model(self.input)


def wrap(job: Job, model: nn.Sequential) -> nn.Module:
    """Partition a model with the package that the job names; both take the same arguments."""
    package = importlib.import_module(job.engine)
    if job.engine == "torchgpipe":
        require_original(package)
    wrapped: nn.Module = package.GPipe(
        model,
        job.balance(len(model)),
        devices=[job.device] * job.partitions,
        chunks=job.chunks,
        checkpoint=job.checkpoint,
    )
    return wrapped


def wrap_for_steps(job: Job, workload: Workload) -> nn.Module:
    """Cut a model for `Pipeline.step`."""
    wrapped: nn.Module = importlib.import_module("pipesight").Pipeline(
        workload.model,
        balance=job.balance(len(workload.model)),
        devices=[job.device] * job.partitions,
        chunks=job.chunks,
        checkpoint=job.checkpoint,
        schedule=job.engine.removeprefix("step "),
        loss_fn=workload.loss,
    )
    return wrapped


def wrap_loop(job: Job, model: Loop) -> nn.Module:
    """Cut a model that is no `nn.Sequential` where `wrap` cuts the one that has the same layers."""
    last = [sum(job.balance(len(model.blocks) + 2)[: j + 1]) for j in range(job.partitions - 1)]
    wrapped: nn.Module = importlib.import_module("pipesight").Pipeline(
        model,
        [f"blocks.{layer - 1}" for layer in last],  # the embedding is layer 0
        devices=[job.device] * job.partitions,
        chunks=job.chunks,
        checkpoint=job.checkpoint,
    )
    return wrapped
