"""`DistributedPipeline`: the model of `GPipe` over many processes, started by ``torchrun``."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from pipesight.distributed.agreement import Agreement, Message
from pipesight.distributed.cut_arguments import check_way, sizes_and_names
from pipesight.distributed.failures import RankMonitor
from pipesight.distributed.grad_scaler import GradScaler, refuse_plain_scalers
from pipesight.distributed.layer_pipeline import LayerPipeline
from pipesight.distributed.loss_weights import LossFunction
from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.model_pipeline import ModelPipeline
from pipesight.distributed.replicas import KINDS
from pipesight.distributed.transfers import TransferringStage
from pipesight.pipeline.argument_text import argument_text
from pipesight.pipeline.batch_dims import BatchDim
from pipesight.pipeline.loss_merging import LossWeight
from pipesight.pipeline.partition import Partition
from pipesight.pipeline.step_losses import LossOf
from pipesight.schedule.argument_checks import CheckpointMode, check_checkpoint, check_chunks
from pipesight.schedule.supported_schedules import RankSchedule
from pipesight.schedule.task_orders import Schedule

__all__ = ["DistributedPipeline"]


class DistributedPipeline:
    """Runs a model over the processes of a job, each with some of its partitions.

    Every process makes the same calls. Any model can be cut at modules, ``cuts``. It is called as it is, with the same
    arguments on every rank, and computes its loss itself::

        pipesight.distributed.init_process_group()
        pipeline = DistributedPipeline(make_model, cuts=["transformer.h.4", "transformer.h.8"], chunks=8)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        for batch in loader:
            optimizer.zero_grad()
            loss = pipeline.step(**batch)
            optimizer.step()

    An ``nn.Sequential`` can also be cut by numbers of layers, ``balance``. Then the first rank needs the input, the
    last one the target::

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
        balance: How many layers of an ``nn.Sequential`` each partition takes; names of modules are taken for ``cuts``.
        cuts: Instead of ``balance``, the names of the modules whose first call begins partitions 1, 2 and so on.
        chunks: Number of micro-batches per mini-batch.
        schedule: One of ``pipesight.distributed.schedule_names()``, or an order of tasks: a ``.csv`` file, as
            ``pipesight plan --out`` writes it, or a ``pipesight.plan.Schedule``.
        loss: With ``cuts``, takes the output of the model, returns its loss: by default ``output.loss``.
        loss_fn: Takes output and target of a micro-batch, returns their loss; with ``cuts``, it may be given instead of
            ``loss``. The losses of micro-batches are averaged so that the loss is that of the whole batch, or summed if
            ``loss_fn.reduction`` is ``"sum"``. With ``balance``, it may be a module with parameters: these are trained,
            and saved as ``loss_fn.*``, on the last rank.
        loss_weight: How much the loss of a micro-batch counts in that average, given its output (whose shape alone is
            known) and target. By default the number of samples, and for torch's ``cross_entropy`` and ``nll_loss``
            what their mean is over. ``"sum"`` sums losses; ``"samples"`` averages them by samples, without a check
            that this gives the loss of the whole batch. With ``cuts``, a function gets the arguments of a micro-batch,
            and cannot be given beside ``loss_fn``.
        mesh: The ranks to use: one dimension, or two, named ``pp`` and ``dp``. All ranks by default. With ``dp``,
            give each replica of the pipeline its own part of the batch: it is not split for you.
        checkpoint: Which micro-batches are recomputed in backward instead of keeping their activations:
            ``"always"`` all of them, ``"except_last"``, or ``"never"``.
        deferred_batch_norm: Let ``nn.BatchNorm*`` track the statistics of the whole mini-batch instead of those of
            each micro-batch.
        data_parallel: ``"ddp"`` keeps every replica whole, ``"fsdp"`` shards parameters and gradients over them.
        sample: With ``cuts``, arguments of a call, ``(args, kwargs)``: they show which partition uses which parameter.
            Without, this is guessed by the order of modules, and a wrong guess costs time.
        batch_dim: With ``cuts``, which dimension of the arguments is the batch, if not the first.
        verify: With ``cuts``, compare the first step in training mode with the plain model, loss and gradients, and
            raise if they differ. The last rank holds the whole model meanwhile.
        timeout: How many seconds a rank may keep others waiting, in a step or between steps, before they name it and
            raise; by default the timeout of the process group.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        balance: Iterable[int] | Sequence[str] | None = None,
        *,
        cuts: Sequence[str] | None = None,
        chunks: int,
        schedule: str | PathLike[str] | Schedule = "1f1b",
        loss: Callable[[Any], Any] | None = None,
        loss_fn: LossFunction | None = None,
        loss_weight: LossWeight | Callable[..., Any] | None = None,
        mesh: DeviceMesh | None = None,
        checkpoint: CheckpointMode = "never",
        deferred_batch_norm: bool = False,
        data_parallel: Literal["ddp", "fsdp"] = "ddp",
        sample: tuple[Sequence[Any], dict[str, Any]] | None = None,
        batch_dim: BatchDim = None,
        verify: bool = False,
        timeout: float | None = None,
    ) -> None:
        check_supported()
        balance, cuts = sizes_and_names(balance, cuts)
        check_way(balance, cuts, loss, loss_fn, sample, batch_dim, verify)
        if data_parallel not in KINDS:
            raise ValueError(f"data_parallel is not one of 'ddp' or 'fsdp' (data_parallel: {data_parallel!r})")
        self._chunks = check_chunks(chunks)
        self._checkpoint = check_checkpoint(checkpoint)
        self._data_parallel = data_parallel
        self._mesh = PipelineMesh(mesh, timeout)
        self._where = Where()
        self._monitor = RankMonitor(
            [self._mesh.control_group, self._mesh.pipeline_group, self._mesh.replica_group], self._where, timeout
        )
        self._agreement = Agreement(self._mesh.control_group, self._monitor)
        self._kind = self._choose(schedule)
        self._part: LayerPipeline | ModelPipeline
        if cuts is None:
            assert balance is not None
            assert loss_fn is not None
            self._part = LayerPipeline(
                module,
                balance,
                self._kind,
                self._mesh,
                loss_fn=loss_fn,
                loss_weight=loss_weight,
                deferred_batch_norm=deferred_batch_norm,
                data_parallel=data_parallel,
            )
        else:
            self._part = ModelPipeline(
                module,
                cuts,
                self._kind,
                self._mesh,
                sample=sample,
                loss_of=LossOf(loss, loss_fn),
                loss_weight=loss_weight,
                batch_dim=batch_dim,
                deferred_batch_norm=deferred_batch_norm,
                data_parallel=data_parallel,
                verify=verify,
            )
        self._kind.check(self._chunks, self._mesh.length, len(self._part.balance))
        self._part.start(self._monitor)
        self._runner = self._part.runner(self._chunks, self._agreement, self._monitor, self._where, self._checkpoint)
        arguments: Message = {"chunks": self._chunks, "schedule": self._kind.identity, "checkpoint": checkpoint}
        arguments["loss_weight"] = "a function" if callable(loss_weight) else loss_weight
        arguments |= {"data_parallel": data_parallel, **self._part.arguments()}
        message: Message = {"call": type(self).__name__, "arguments": arguments, "device": str(self._mesh.device)}
        messages = self._agreement.settle({**message, "pipe": secrets.randbelow(2**53 - 1) + 1})
        self._devices = {rank: str(answer["device"]) for rank, answer in messages.items()}
        refuse_plain_scalers(self.parameters())
        self._where.pipe = messages[self._mesh.members[0]]["pipe"]

    def __repr__(self) -> str:
        """Say how the model is cut and run, what this rank has of it, and list its layers."""
        if "_devices" not in self.__dict__:  # its constructor raised, or has not returned
            return object.__repr__(self)
        cuts = self.cuts
        text = argument_text(
            balance=self.balance if cuts is None else None,
            cuts=cuts,
            devices=self.devices,
            chunks=self._chunks,
            checkpoint=self._checkpoint,
            schedule=self.schedule,
        )
        if len(self._mesh.pipelines) > 1:
            text += f", data_parallel={self._data_parallel!r}"
        lines = [text, f"rank {dist.get_rank()} has partitions {[*self.partitions]} of {len(self.ranks)}:"]
        lines.append(f"(module): {self.module!r}")
        return f"{type(self).__name__}(\n{textwrap.indent(chr(10).join(lines), '  ')}\n)"

    def _choose(self, schedule: str | PathLike[str] | Schedule) -> RankSchedule:
        """Return the schedule. Its file may be missing on one machine: then all ranks raise."""
        kind: RankSchedule | None = None
        error: Exception | None = None
        try:
            kind = schedules.choose(schedule)
        except (OSError, ValueError) as found:
            error = found
        self._agreement.settle({"call": type(self).__name__}, error)
        assert kind is not None
        return kind

    @property
    def module(self) -> nn.Module:
        """The layers of this rank, under the names that they have in the plain model."""
        return self._part.module

    @property
    def _stages(self) -> Sequence[TransferringStage]:
        return self._part.stages

    @property
    def _learned(self) -> nn.Module:
        return self._part.learned()

    @property
    def balance(self) -> list[int]:
        """How many layers each partition takes."""
        return list(self._part.balance)

    @property
    def cuts(self) -> list[str] | None:
        """The modules that begin partitions 1, 2 and so on, if the model is cut at modules."""
        return list(self._part.cuts) if isinstance(self._part, ModelPipeline) else None

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
        return self._part.outlines()

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks that have each partition, one in each pipeline of the mesh."""
        place = [self._kind.rank_of(j, self._mesh.length) for j in range(len(self._part.balance))]
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
        return self._stages[-1].j == len(self._part.balance) - 1

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
        self._part.train(mode)
        return self

    def eval(self) -> DistributedPipeline:
        """Set the mode of all layers, as ``nn.Module.eval`` does. Call it on every rank."""
        return self.train(False)

    def step(
        self, *args: Any, broadcast_loss: bool = False, scaler: GradScaler | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Run forward and backward of one mini-batch; gradients are added to ``.grad``, as ``backward`` does.

        Args:
            *args: With ``cuts``, the arguments of the model, then the target if there is a ``loss_fn``, the same on
                every rank. With ``balance``, ``input``, which
                the first rank needs, and ``target``, which the last one does; others ignore them.
            broadcast_loss: Return the loss on every rank, not only on the last.
            scaler: A ``pipesight.distributed.GradScaler``, on every rank, to scale gradients against underflow.
            **kwargs: As ``args``.

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
            given = (args, kwargs)
            return self._part.loss(self, "step", given, learns=True, scale=scale, everywhere=broadcast_loss)

    def eval_step(self, *args: Any, broadcast_loss: bool = False, **kwargs: Any) -> Tensor | None:
        """Return the loss of one mini-batch, as :meth:`step` does, without a backward."""
        with torch.no_grad():
            given = (args, kwargs)
            return self._part.loss(self, "eval_step", given, learns=False, scale=None, everywhere=broadcast_loss)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model for one mini-batch on the last rank, and ``None`` on others."""
        with torch.no_grad():
            return self._part.predict(self, (args, kwargs))

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

    def load_pretrained(self, folder: str | PathLike[str]) -> None:
        """Read weights from safetensors files, as ``save_pretrained`` of transformers writes them; only with ``cuts``.

        Each rank reads its own part. Call it on every rank.

        Example::

            config = AutoConfig.from_pretrained("gpt2-folder")
            pipeline = DistributedPipeline(lambda: GPT2LMHeadModel(config), cuts=["transformer.h.6"], chunks=8)
            pipeline.load_pretrained("gpt2-folder")
        """
        error: Exception | None = None
        try:
            if not isinstance(self._part, ModelPipeline):
                raise TypeError("load_pretrained needs a model that is cut at modules: cuts=[...] instead of balance")
            self._part.read(folder)
        except Exception as found:
            error = found
        self._agreement.settle({"call": f"load_pretrained {folder}"}, error)

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
