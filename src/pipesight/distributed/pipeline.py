"""`DistributedPipeline`: the model of `GPipe` over many processes, started by ``torchrun``."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipesight import context
from pipesight._torch.pipelining import check_supported
from pipesight.context import Where
from pipesight.distributed import saving, schedules
from pipesight.distributed.agreement import LAYERS, Agreement, Message
from pipesight.distributed.failures import RankMonitor
from pipesight.distributed.grad_scaler import GradScaler, refuse_plain_scalers
from pipesight.distributed.loss_weights import LossFunction, LossWeights
from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.model_building import build_model
from pipesight.distributed.rank_initialisation import Recipe
from pipesight.distributed.replicas import KINDS
from pipesight.distributed.shapes import Skeleton
from pipesight.distributed.stage_building import learned_with, make_stages
from pipesight.distributed.step_inputs import StepInputs
from pipesight.distributed.step_runner import ScheduleRunner, StepRunner
from pipesight.pipeline.loss_merging import LossWeight
from pipesight.pipeline.microbatch import TensorOrTensors
from pipesight.pipeline.partition import Partition, verify_sequential
from pipesight.pipeline.skip import verify_skippables
from pipesight.schedule.argument_checks import CheckpointMode, check_balance, check_checkpoint, check_chunks

__all__ = ["DistributedPipeline"]


class DistributedPipeline:
    """Runs an ``nn.Sequential`` over the processes of a job, each with some of its partitions.

    Every process makes the same calls. The first rank needs the input, the last one the target::

        pipesight.distributed.init_process_group()
        pipeline = DistributedPipeline(make_model, balance=[2, 2], chunks=8, loss_fn=nn.CrossEntropyLoss())
        optimizer = torch.optim.AdamW(pipeline.parameters())
        for input, target in loader:
            optimizer.zero_grad()
            loss = pipeline.step(input, target)
            optimizer.step()

    Args:
        module: The model, or a function without arguments that builds it. The function runs on the meta device; each
            rank allocates and initialises only its own layers. The weights depend on the seed and the layer, not on
            the number of ranks. If the function needs values, or leaves a tensor uninitialised, the ranks of each
            machine call it on the CPU instead, one after the other, with the seed of the rank.
        balance: How many layers each partition takes.
        chunks: Number of micro-batches per mini-batch.
        schedule: One of ``pipesight.distributed.schedule_names()``.
        loss_fn: Takes output and target of a micro-batch, returns their loss. The losses of micro-batches are averaged
            so that the loss is that of the whole batch, or summed if ``loss_fn.reduction`` is ``"sum"``. If it is a
            module with parameters, these are trained, and saved as ``loss_fn.*``, on the last rank.
        loss_weight: How much the loss of a micro-batch counts in that average, given its output (whose shape alone is
            known) and target. By default the number of samples, and for torch's ``cross_entropy`` and ``nll_loss``
            what their mean is over. ``"sum"`` sums losses; ``"samples"`` averages them by samples, without a check
            that this gives the loss of the whole batch.
        mesh: The ranks to use: one dimension, or two, named ``pp`` and ``dp``. All ranks by default. With ``dp``,
            give each replica of the pipeline its own part of the batch: it is not split for you.
        checkpoint: Which micro-batches are recomputed in backward instead of keeping their activations:
            ``"always"`` all of them, ``"except_last"``, or ``"never"``.
        deferred_batch_norm: Let ``nn.BatchNorm*`` track the statistics of the whole mini-batch instead of those of
            each micro-batch.
        data_parallel: ``"ddp"`` keeps every replica whole, ``"fsdp"`` shards parameters and gradients over them.
        timeout: How many seconds a rank may keep others waiting, in a step or between steps, before they name it and
            raise; by default the timeout of the process group.
    """

    def __init__(
        self,
        module: nn.Sequential | Callable[[], nn.Sequential],
        balance: Iterable[int],
        *,
        chunks: int,
        schedule: str = "1f1b",
        loss_fn: LossFunction,
        loss_weight: LossWeight | None = None,
        mesh: DeviceMesh | None = None,
        checkpoint: CheckpointMode = "never",
        deferred_batch_norm: bool = False,
        data_parallel: Literal["ddp", "fsdp"] = "ddp",
        timeout: float | None = None,
    ) -> None:
        check_supported()
        if data_parallel not in KINDS:
            raise ValueError(f"data_parallel is not one of 'ddp' or 'fsdp' (data_parallel: {data_parallel!r})")
        self._kind = schedules.choose(schedule)
        self._chunks = check_chunks(chunks)
        self._checkpoint = check_checkpoint(checkpoint)
        self._data_parallel = data_parallel
        loss_weights = LossWeights(loss_fn, loss_weight)
        self._mesh = PipelineMesh(mesh, timeout)
        sizes = list(balance)
        recipe: Recipe | None = None
        if not isinstance(module, nn.Module):
            module, recipe = build_model(module, lambda n: self._layers_of(sizes, n), first=dist.get_rank() == 0)
        verify_sequential(module)
        assert isinstance(module, nn.Sequential)
        verify_skippables(module)
        self._balance = check_balance(sizes, len(module))
        self._kind.check(self._chunks, self._mesh.length, len(self._balance))
        self._where = Where()
        self._monitor = RankMonitor(
            [self._mesh.control_group, self._mesh.pipeline_group, self._mesh.replica_group], self._where, timeout
        )
        self._skeleton = Skeleton(module, self._balance, self._mesh.device)
        with self._monitor.explaining("other replicas to start"):
            self._stages = make_stages(
                module,
                recipe,
                self._skeleton,
                self._kind,
                self._mesh,
                deferred_batch_norm=deferred_batch_norm,
                data_parallel=data_parallel,
            )
        self.module = nn.Sequential(
            OrderedDict(child for stage in self._stages for child in stage.submod.named_children())
        )
        """The layers of this rank, under the names that they have in the plain model."""
        self.module.training = module.training
        self._learned = learned_with(self.module, loss_fn, self._stages[-1], self._mesh, data_parallel)
        self._agreement = Agreement(self._mesh.control_group, self._monitor)
        self._runner = StepRunner(
            self.module,
            StepInputs(self._skeleton, self._mesh, self._kind, self._chunks, loss_weights),
            ScheduleRunner(self._kind, self._stages, self._mesh.length),
            self._agreement,
            self._monitor,
            self._where,
            self._checkpoint,
        )
        arguments: Message = {"chunks": self._chunks, "schedule": self._kind.name, "checkpoint": checkpoint}
        arguments["loss_weight"] = "a function" if callable(loss_weight) else loss_weight
        arguments |= {"data_parallel": data_parallel, "balance": self._balance, LAYERS: self._skeleton.fingerprint()}
        message: Message = {"call": type(self).__name__, "arguments": arguments, "device": str(self._mesh.device)}
        messages = self._agreement.settle({**message, "pipe": secrets.randbelow(2**53 - 1) + 1})
        self._devices = {rank: str(answer["device"]) for rank, answer in messages.items()}
        refuse_plain_scalers(self.parameters())
        self._where.pipe = messages[self._mesh.members[0]]["pipe"]

    def _layers_of(self, balance: list[int], count: int) -> set[int]:
        """Return the indices of the layers of this rank, given how many layers there are."""
        sizes = check_balance(balance, count)
        mine = self._kind.partitions_of(self._mesh.position, self._mesh.length, len(sizes))
        return {k for j in mine for k in range(sum(sizes[:j]), sum(sizes[: j + 1]))}

    @property
    def balance(self) -> list[int]:
        """How many layers each partition takes."""
        return list(self._balance)

    @property
    def chunks(self) -> int:
        """Number of micro-batches per mini-batch."""
        return self._chunks

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self._kind.name

    @property
    def checkpoint(self) -> CheckpointMode:
        """Which micro-batches are recomputed in backward."""
        return self._checkpoint

    @property
    def partitions(self) -> dict[int, Partition]:
        """The partitions of this rank, by number."""
        return {stage.j: stage.submod for stage in self._stages}  # type: ignore[misc]

    @property
    def outlines(self) -> list[Partition]:
        """All partitions, those of other ranks too, with tensors that have a shape but no memory."""
        return list(self._skeleton.partitions)

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks that have each partition, one in each pipeline of the mesh."""
        place = [self._kind.rank_of(j, self._mesh.length) for j in range(len(self._balance))]
        return [[pipeline[k] for pipeline in self._mesh.pipelines] for k in place]

    @property
    def devices(self) -> list[str]:
        """The device of each partition, in the pipeline of this rank."""
        return [self._devices[ranks[self._mesh.replica]] for ranks in self.ranks]

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first partition, and needs the input."""
        return self._stages[0].j == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last partition, needs the target and gets the loss."""
        return self._stages[-1].j == len(self._balance) - 1

    @property
    def data_parallel(self) -> str:
        """What replicas do: ``"ddp"`` or ``"fsdp"``."""
        return self._data_parallel

    @property
    def data_parallel_group(self) -> ProcessGroup:
        """The ranks with the same partitions as this one; only this one without data parallelism."""
        return self._mesh.replica_group

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, for an optimizer; on the last rank also those of ``loss_fn``."""
        return self._learned.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank, with their names in the plain model."""
        return self._learned.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's layers, under the keys of the plain model."""
        return self._learned.state_dict()

    def train(self, mode: bool = True) -> DistributedPipeline:
        """Set the mode of all layers, as ``nn.Module.train`` does. Call it on every rank."""
        self._learned.train(mode)
        self.module.train(mode)
        for stage in self._stages:
            stage.submod.train(mode)
        self._skeleton.train(mode)
        return self

    def eval(self) -> DistributedPipeline:
        """Set the mode of all layers, as ``nn.Module.eval`` does. Call it on every rank."""
        return self.train(False)

    def step(
        self,
        input: TensorOrTensors | None = None,
        target: Any = None,
        *,
        broadcast_loss: bool = False,
        scaler: GradScaler | None = None,
    ) -> Tensor | None:
        """Run forward and backward of one mini-batch; gradients are added to ``.grad``, as ``backward`` does.

        Args:
            input: Needed on the first rank, ignored on others.
            target: Needed on the last rank, ignored on others.
            broadcast_loss: Return the loss on every rank, not only on the last.
            scaler: A ``pipesight.distributed.GradScaler``, on every rank, to scale gradients against underflow.

        Returns:
            The loss of the whole mini-batch, that of all data-parallel replicas; ``None`` on ranks that do not get it.
        """
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                f"scaler must be a pipesight.distributed.GradScaler, but got {type(scaler).__module__}."
                f"{type(scaler).__qualname__}, which sees only the overflows of this rank"
            )
        scale = None if scaler is None else scaler.factor()
        with torch.enable_grad():
            batch = self._runner.run(self, "step", (input, target), learns=True, scale=scale)
        return self._runner.loss(batch, everywhere=broadcast_loss)

    def eval_step(
        self, input: TensorOrTensors | None = None, target: Any = None, *, broadcast_loss: bool = False
    ) -> Tensor | None:
        """Return the loss of one mini-batch, as :meth:`step` does, without a backward."""
        with torch.no_grad():
            batch = self._runner.run(self, "eval_step", (input, target), learns=False)
        return self._runner.loss(batch, everywhere=broadcast_loss)

    def predict(self, input: TensorOrTensors | None = None) -> Any:
        """Return the output of the model for one mini-batch on the last rank, and ``None`` on others."""
        with torch.no_grad():
            batch = self._runner.run(self, "predict", (input, None), learns=False, with_target=False)
        return batch.output() if self.is_last else None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all ranks so that their common norm is at most ``max_norm``; return the norm."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        with self._monitor.explaining("the norms of other ranks"):
            total = self._mesh.total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def save(
        self,
        folder: str | PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        extra: Any = None,
        step: int | None = None,
        keep: int = 2,
    ) -> Path:
        """Write a checkpoint to ``folder``, all ranks together; an unfinished one is ignored later.

        Args:
            folder: Where checkpoints are, on storage that all ranks share.
            optimizer: That of this rank.
            extra: Anything else to save, such as the epoch: picklable, and the same on all ranks.
            step: The number of the checkpoint, by default how many training steps there have been.
            keep: How many checkpoints to keep.

        Returns:
            The path of the checkpoint.
        """
        if keep < 1:
            raise ValueError(f"keep must be a positive integer (keep: {keep})")
        number = self._runner.steps if step is None else step
        call: Message = {"call": f"save {folder}", "arguments": {"step": number, "keep": keep}}
        content, group = {"steps": self._runner.steps, "extra": extra}, self._mesh.control_group
        with self._monitor.explaining("all ranks to save"):
            saving.agree_on_extra(self._agreement, call, extra)
            return saving.save(folder, self._learned, optimizer, content, step=number, keep=keep, group=group)

    def load(self, folder: str | PathLike[str], optimizer: Optimizer | None = None) -> Any:
        """Resume from the latest checkpoint in ``folder``, whatever ranks and partitions wrote it.

        An incomplete one is skipped with a warning.

        Example::

            start = pipeline.load("checkpoints", optimizer) or 0
            for epoch in range(start, 10):
                ...
                pipeline.save("checkpoints", optimizer, extra=epoch + 1)

        Returns:
            The ``extra`` of :meth:`save`; ``None`` if there is no checkpoint.

        Raises:
            ValueError: There are checkpoints, but none is complete.
        """
        message: Message = {"call": f"load {folder}"}
        first, error = self._agreement.ranks[0], None
        if dist.get_rank() == first:
            try:
                message["latest"] = saving.latest(folder)
            except ValueError as found:
                error = found
        latest = self._agreement.settle(message, error)[first]["latest"]
        if latest is None:
            return None
        with self._monitor.explaining("all ranks to load"):
            content = saving.load(Path(folder) / latest, self._learned, optimizer, group=self._mesh.control_group)
        self._runner.steps = content["steps"]
        context.catch_up(self._runner.steps)
        return content["extra"]

    def save_on_sigterm(
        self, folder: str | PathLike[str], optimizer: Optimizer | None = None, *, extra: Callable[[], Any] | None = None
    ) -> None:
        """On SIGTERM, which precedes a preemption, save at the next step and exit with code 143.

        One rank receiving the signal is enough. Call this in the main thread of every rank.

        Args:
            folder: As for :meth:`save`.
            optimizer: As for :meth:`save`.
            extra: Returns what :meth:`save` takes as ``extra``.
        """
        self._runner.preemption.on_sigterm(
            lambda: self.save(folder, optimizer, extra=None if extra is None else extra())
        )
