"""`Pipeline`: any model as a pipeline over the devices of one process, as it is."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from pipesight import context
from pipesight._torch.module_internals import not_compiled, target_device
from pipesight._torch.tensors import in_transform
from pipesight.pipeline.argument_text import argument_text
from pipesight.pipeline.autograd_node import connect
from pipesight.pipeline.batch_dims import BatchDim, BatchDims
from pipesight.pipeline.caller_state import CallerState
from pipesight.pipeline.calls import split_call
from pipesight.pipeline.choosing_cuts import CallSample, cuts_by_size, cuts_by_time
from pipesight.pipeline.devices import choose_devices
from pipesight.pipeline.generating import through_pipeline
from pipesight.pipeline.loss_merging import LossMerging, LossWeight
from pipesight.pipeline.minibatch import MiniBatch
from pipesight.pipeline.notices import Notices
from pipesight.pipeline.outputs import Merge
from pipesight.pipeline.partition import Partition
from pipesight.pipeline.placed_units import Placement
from pipesight.pipeline.stepping import Stepper, scale_of
from pipesight.pipeline.trip import hook
from pipesight.pipeline.trips import TripEngine, Trips, TripTape
from pipesight.pipeline.units import check_cuts, refuse_shards
from pipesight.pipeline.verification import verify_call, verify_step
from pipesight.schedule.argument_checks import (
    CheckpointMode,
    check_balance,
    check_checkpoint,
    check_chunks,
    checkpoint_stop,
)
from pipesight.schedule.worker_orders import ScheduleChoice, name_of

__all__ = ["Pipeline"]


class _ModelForward:
    """`Pipeline.forward`, with the signature of the model's own: trainers ask for it."""

    def __get__(self, pipe: Pipeline | None, owner: type[Pipeline]) -> Any:
        if pipe is None:
            return owner._call
        forward: Any = functools.partial(owner._call, pipe)
        forward.__signature__ = pipe._signature
        return forward


class Pipeline(nn.Module):
    """Runs any model as a pipeline, through its own ``forward``: no tracing, no ``nn.Sequential``.

    ::

        model = GPT2LMHeadModel(config)
        pipe = Pipeline(model, cuts=["transformer.h.4", "transformer.h.8"], chunks=8)
        pipe(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()

    It is called as the model is, and returns what the model returns. ``state_dict()`` and ``named_parameters()`` have
    the model's own names; its other attributes, such as ``config``, can be reached through the pipeline.

    :meth:`step` runs forward and backward together, with the loss of each micro-batch inside, in the order of any
    schedule. That needs less memory: no more micro-batches are alive at once than the schedule asks for. ::

        pipe = Pipeline(model, cuts=["transformer.h.4", "transformer.h.8"], chunks=8, schedule="1f1b")
        loss = pipe.step(input_ids=ids, labels=labels)

    Args:
        module: The model, or a function without arguments that builds it.
        cuts: The modules, by name, whose first call begins the next partition; none, ``[]``, make one partition.
        balance: Instead of cuts, for an ``nn.Sequential``: how many layers each partition takes.
        partitions: Instead of cuts: how many partitions, which are about equal.
        sample: A call to measure for that, ``(args, kwargs)`` or ``kwargs`` alone.
        equal: In what they are: ``"time"`` or ``"memory"``; see `pipesight.balance.cuts_by_time` and ``cuts_by_size``.
        devices: One per partition. By default the CUDA devices in order, or the CPU for every partition if there is no
            GPU. Parameters move to the device of the partition that uses them first.
        chunks: Number of micro-batches per mini-batch.
        checkpoint: Which micro-batches are recomputed in backward instead of keeping their activations:
            ``"always"`` all of them, ``"except_last"``, or ``"never"``. Recomputed are the model's blocks; what is
            between them is kept.
        batch_dim: Which dimension of an argument or output is the batch, if not the first: one for all, or by name.
        loss_weight: How losses that the model returns are weighed. By default by what they are means over, which is
            read off their graphs. ``"samples"`` averages them by samples, ``"sum"`` adds them; a function that is
            called as the model is, with the arguments of a micro-batch, returns what its loss is a mean over. With
            ``loss_fn``, the function gets output, whose shape alone is known, and target.
        schedule: The order in which :meth:`step` runs its tasks: ``"1f1b"``, ``"gpipe"``, ``"zero-bubble"``,
            ``"interleaved-1f1b"``, ``"looped-bfs"``, ``"interleaved-zero-bubble"``, ``"zbv-zero-bubble"``,
            ``"dualpipev"``, ``"v-half"``, ``"v-min"``, the path of a ``.csv`` file, or a ``pipesight.plan.Schedule``.
            Calls of the pipeline itself run forwards only, and their ``backward()`` in the order of GPipe.
        loss: For :meth:`step`: takes the output of the model, returns its loss; by default ``output.loss``.
        loss_fn: For :meth:`step`, instead: takes output and target of a micro-batch, returns their loss.
        verify: Compare the first call in training mode with the plain model, outputs and gradients, and raise if they
            differ. It takes copies of the model and a few times as long as a step.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        cuts: Sequence[str] | None = None,
        *,
        balance: Iterable[int] | None = None,
        partitions: int | None = None,
        sample: CallSample | None = None,
        equal: Literal["time", "memory"] = "time",
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        batch_dim: BatchDim = None,
        schedule: ScheduleChoice | PathLike[str] = "1f1b",
        loss: Callable[[Any], Any] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        loss_weight: LossWeight | None = None,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self._chunks = check_chunks(chunks)
        if not isinstance(module, nn.Module):
            module = _built(module)
        if balance is not None:
            if cuts is not None or partitions is not None:
                raise TypeError("balance says where the model is cut, so it must be given without cuts and partitions")
            cuts = _cuts_of(module, balance)
        if cuts is None and partitions is not None and sample is not None:
            if equal not in ("time", "memory"):
                raise ValueError(f"equal must be 'time' or 'memory', in which partitions are equal, but got {equal!r}")
            choose = cuts_by_time if equal == "time" else cuts_by_size
            cuts = choose(module, sample, partitions, chunks=chunks, batch_dim=batch_dim)
        elif partitions is not None or sample is not None:
            raise TypeError("partitions and sample must be given together, and without cuts: they choose the cuts")
        names = check_cuts(module, cuts)
        self._checkpoint = check_checkpoint(checkpoint)
        self._placement = Placement(module, names, choose_devices(devices, 1 + len(names)))
        self._signature = inspect.signature(module.forward)
        self._dims = BatchDims(batch_dim, self._signature, () if loss_fn is None else ("target",), module)
        self._losses = LossMerging(loss_weight if loss_fn is None else None)
        self._stepper = Stepper(schedule, loss, loss_fn, loss_weight)
        self._steps = 0
        self._ran: dict[str, Any] = {"schedule": "gpipe"}
        self._to_verify, self._notices = verify, Notices()
        # The same tables as the model's, so that both have the same names for everything.
        self.__dict__.update(
            _modules=module._modules, _parameters=module._parameters, _buffers=module._buffers, training=module.training
        )
        hook({*self._placement.units, *self._placement.cuts})
        self._stepper.orders(self, self._chunks, 0)  # raises if the schedule does not fit

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._placement.model

    @property
    def cuts(self) -> list[str]:
        """The modules that begin partitions 1, 2 and so on."""
        return self._placement.names[1:]

    @property
    def partitions(self) -> list[Partition]:
        """The units of each partition, by name. Where a unit is becomes certain when it is first called."""
        return self._placement.partitions

    @property
    def balance(self) -> list[int]:
        """How many units each partition has."""
        return [len(partition) for partition in self._placement.partitions]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return list(self._placement.devices)

    @property
    def chunks(self) -> int:
        """Number of micro-batches per mini-batch. It may be changed between calls."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = check_chunks(chunks)

    @property
    def checkpoint(self) -> CheckpointMode:
        """Which micro-batches are recomputed in backward. It may be changed between calls."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointMode) -> None:
        self._checkpoint = check_checkpoint(checkpoint)

    @property
    def ran(self) -> dict[str, Any]:
        """What ran last: the ``schedule``, and if it was that of a step, the ``workers`` of the partitions."""
        return dict(self._ran)

    @property
    def schedule(self) -> str:
        """The name of the order in which :meth:`step` runs its tasks."""
        return name_of(self._stepper.schedule)

    @not_compiled  # which also imports the compiler here: several threads must not
    def step(self, *args: Any, broadcast_loss: bool = False, scaler: GradScaler | None = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of one mini-batch; gradients are added to ``.grad``, as ``backward`` does.

        Args:
            *args: The arguments of the model; with ``loss_fn``, then the target, or ``target=``.
            broadcast_loss: Changes nothing here: a `DistributedPipeline` then returns the loss on every rank.
            scaler: A ``torch.amp.GradScaler``, to scale gradients against underflow.
            **kwargs: As ``args``.

        Returns:
            The loss of the whole mini-batch, which is not scaled and has no graph.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("step() needs gradients, which torch.inference_mode() forbids; use eval_step()")
        if self._to_verify and self.training:
            self._to_verify = False
            verify_step(self, args, kwargs)
        with torch.enable_grad():
            loss = self._stepper.step(self, args, kwargs, scale_of(scaler, self.devices[-1]))
        return loss

    def eval_step(self, *args: Any, broadcast_loss: bool = False, **kwargs: Any) -> Tensor:
        """Return the loss of one mini-batch, as :meth:`step` does, without a backward."""
        with torch.no_grad():
            return self._stepper.evaluate(self, args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model for one mini-batch, without gradients."""
        with torch.no_grad():
            return self(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all parameters so that their norm is at most ``max_norm``; return the norm."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    forward = _ModelForward()

    @not_compiled  # torch.compile around it compiles nothing: it cannot follow into the threads
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with each micro-batch of the arguments; return its outputs, put together."""
        if in_transform():
            raise RuntimeError("torch.func transforms such as vmap and grad cannot see into a pipeline")
        if self._to_verify and self.training and torch.is_grad_enabled():
            self._to_verify = False
            verify_call(self, args, kwargs)
        call = split_call(args, kwargs, self._chunks, self._dims)
        engine = self._engine()
        caller = CallerState(engine.workers, caches_casts=False)
        if self.training and not caller.in_backward:  # else it repeats a call that was counted
            self._steps += 1
        m = len(call.calls)
        if self.training and torch.is_grad_enabled():
            self._notices.begin_batch(self, sum(call.sizes))
        minibatch = MiniBatch(
            engine,
            caller,
            call.sizes,
            checkpoint_stop=checkpoint_stop(self._checkpoint, m) if self.training else 0,
            step=context.step_of_call(self, max(0, self._steps - self.training)),
        )
        if minibatch.grad:
            for piece in (piece for pieces in call.pieces for piece in pieces):
                piece.requires_grad_()
        tape = TripTape(minibatch, call)
        watches = [] if minibatch.grad else self._losses.watches(call)
        trips = Trips(tape, self._placement, engine.workers.threads, engine.workers.shares)
        with call.watched():
            results = trips.run(engine.threads(), call, watches)
        if self.training:
            self._notices.end_batch(self.cuts, trips.called)
        flats = [flat for flat, _ in results]
        merge = tape.merge = Merge(flats, call, self._losses.weigher(call, watches))
        with torch.no_grad():
            outputs = [merge.join(k, [flat.tensors[k].detach() for flat in flats]) for k in range(merge.count)]
        wanted = [any(needed) for needed in zip(*(needed for _, needed in results), strict=True)]
        del results, flats
        if any(wanted):
            outputs = list(connect(tape, call.inputs, outputs, wanted))
        return merge.rebuild(outputs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model, as ``nn.Module.train`` does."""
        self.module.train(mode)
        self.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype, the memory format, or the device if all partitions are on one."""
        device = target_device(*args, **kwargs)
        if device is not None and self._placement.on_one_device:
            self.module.to(*args, **kwargs)
            self._placement.move(choose_devices([device] * len(self.devices), len(self.devices)))
            self.__dict__.pop("_running", None)
            return self
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move to a GPU; see :meth:`to`."""
        if device is None:
            return self.to("cuda")
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device)

    def cpu(self) -> Self:
        """Move to the CPU; see :meth:`to`."""
        return self.to("cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Change all tensors, each of which stays on its device: a trainer may move the model to one of ours."""

        def stay(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if changed.device == tensor.device:
                return changed
            if changed.device not in self._placement.devices:
                raise TypeError(
                    f"cannot move a pipeline to {changed.device}: its partitions are on "
                    f"{[str(d) for d in self._placement.devices]}; choose them in the constructor, "
                    "Pipeline(..., devices=[...])"
                )
            return changed.to(tensor.device)

        self.module._apply(fn if self._placement.on_one_device else stay, recurse)
        if self._placement.on_one_device:
            tensor = next(itertools.chain(self.module.parameters(), self.module.buffers()), None)
            if tensor is not None and tensor.device != self._placement.devices[0]:
                self._placement.move([tensor.device] * len(self.devices))
                self.__dict__.pop("_running", None)
        return self

    def _get_name(self) -> str:
        """Return the name of the model's class: trainers tell by it how to compute a loss."""
        return str(self.module._get_name())

    def __repr__(self) -> str:
        """Say how the model is cut and run, and list its modules."""
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    def extra_repr(self) -> str:
        """Say how the model is cut and run."""
        return argument_text(
            cuts=self.cuts,
            devices=self.devices,
            chunks=self._chunks,
            checkpoint=self._checkpoint,
            schedule=self.schedule,
        )

    def _engine(self) -> TripEngine:
        """Return what runs the partitions, created on first use and again after a copy or a fork."""
        engine: TripEngine | None = self.__dict__.get("_running")
        if engine is None or not engine.workers.alive:
            refuse_shards(self.module)  # it may be since the pipeline was made
            engine = self.__dict__["_running"] = TripEngine.of(self._placement)
        return engine

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_running"}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_placement" not in self.__dict__:
                raise
            found = getattr(self.module, name)
            if name == "generate" and not self._placement.on_one_device:
                return through_pipeline(self, found)
            return found


def _built(function: Any) -> nn.Module:
    """Return the model that a function makes, as it does for a `DistributedPipeline`."""
    model = function() if inspect.isroutine(function) or isinstance(function, type | functools.partial) else function
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, or a function that makes one, but got {type(model).__name__}")
    return model


def _cuts_of(module: Any, balance: Iterable[int]) -> list[str]:
    """Return the layers of a sequential that begin partitions 1, 2 and so on."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"balance counts the layers of an nn.Sequential, but the model is {type(module).__name__}; use cuts=[...], "
            "the names of the modules that begin partitions"
        )
    sizes = check_balance(balance, len(module))
    names = [name for name, _ in module.named_children()]
    return [names[stop] for stop in itertools.accumulate(sizes[:-1])]
