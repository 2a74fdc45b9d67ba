"""A call of `Pipeline.step`: cut it, run it in the order of the schedule, and add the gradients to ``.grad``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from pipesight import context
from pipesight.pipeline.caller_state import CallerState
from pipesight.pipeline.calls import SplitCall, split_call
from pipesight.pipeline.gradients import GradientSum
from pipesight.pipeline.loss_merging import LossMerging, LossWeight
from pipesight.pipeline.minibatch import MiniBatch
from pipesight.pipeline.step_losses import TARGET, LossOf, StepLosses
from pipesight.pipeline.step_pass import StepPass
from pipesight.pipeline.trips import TripTape
from pipesight.plan.schedule_files import load_schedule
from pipesight.schedule.argument_checks import checkpoint_stop
from pipesight.schedule.task_orders import Schedule, one_f_one_b
from pipesight.schedule.worker_orders import ScheduleChoice, WorkerOrders, name_of, worker_orders

if TYPE_CHECKING:
    from pipesight.pipeline.any_model import Pipeline

__all__ = ["Stepper", "scale_of"]


class Stepper:
    """What a pipeline's steps have in common.

    A ``schedule`` that is a path is that of a CSV file.
    """

    def __init__(
        self,
        schedule: ScheduleChoice | PathLike[str],
        loss: Callable[[Any], Any] | None,
        loss_fn: Callable[[Any, Any], Any] | None,
        loss_weight: LossWeight | None,
    ) -> None:
        if isinstance(schedule, PathLike) or (isinstance(schedule, str) and schedule.endswith(".csv")):
            schedule = load_schedule(schedule)
        self.schedule: ScheduleChoice = schedule
        name_of(schedule)
        self.loss_of = LossOf(loss, loss_fn)
        self.merging = LossMerging(loss_weight, strict=self.loss_of.takes_target)

    def orders(self, pipe: Pipeline, m: int, checkpointed: int) -> WorkerOrders:
        """Return what the workers do with ``m`` micro-batches; a batch may be too small for the schedule.

        Raises:
            ValueError: The schedule does not fit the pipeline.
        """
        gpus = [str(device) if device.type == "cuda" else None for device in pipe.devices]
        again = [i < checkpointed for i in range(m)]
        if m == pipe.chunks:
            chosen = self.schedule
            if isinstance(chosen, Schedule) and chosen.chunks != m:
                raise ValueError(
                    f"the schedule must be for as many micro-batches as the pipeline has (schedule: {chosen.chunks}, "
                    f"chunks: {m}); use chunks={chosen.chunks}"
                )
            return worker_orders(chosen, m, gpus, recompute=again)
        whole = worker_orders(self.schedule, pipe.chunks, gpus)
        try:
            return worker_orders(self.schedule, m, gpus, recompute=again)
        except ValueError:
            stand_in = one_f_one_b(len(gpus), m, device_of_stage=whole.homes)
            return worker_orders(stand_in, m, gpus, recompute=again)

    def split(
        self, pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any], *, chunks: int | None = None
    ) -> tuple[SplitCall, list[Any]]:
        """Cut the arguments of a step; return them, without the target, and the targets of micro-batches."""
        m = pipe.chunks if chunks is None else chunks
        if not self.loss_of.takes_target:
            return split_call(args, kwargs, m, pipe._dims), []
        inputs, more, target = self.loss_of.apart(args, kwargs)
        call = split_call(inputs, {**more, TARGET: target}, m, pipe._dims)
        self.loss_of.check_target(call, target, pipe._dims)
        targets = []
        for (_, kwargs), arguments in zip(call.calls, call.arguments, strict=True):
            targets.append(kwargs.pop(TARGET))
            del arguments[TARGET]
        return call, targets

    def step(self, pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any], scale: float) -> Tensor:
        """Run a step; return its loss."""
        call, targets = self.split(pipe, args, kwargs)
        m = len(call.calls)
        engine = pipe._engine()
        caller = CallerState(engine.workers, caches_casts=False)
        if caller.in_backward or caller.in_checkpoint:
            raise RuntimeError("step() runs a backward itself, so it cannot be called in a backward or a checkpoint")
        stop = checkpoint_stop(pipe.checkpoint, m) if pipe.training else 0
        orders = self.orders(pipe, m, stop)
        if pipe.training:
            pipe._notices.begin_batch(pipe, sum(call.sizes))
        pipe._steps += pipe.training
        step = context.step_of_call(pipe, max(0, pipe._steps - pipe.training))
        minibatch = MiniBatch(engine, caller, call.sizes, checkpoint_stop=stop, step=step)
        for piece in (piece for pieces in call.pieces for piece in pieces):
            piece.requires_grad_()
        tape = TripTape(minibatch, call)
        losses = StepLosses(self.loss_of, self.merging, call, targets, scale)
        pipe._ran = {"schedule": orders.name, "workers": list(orders.homes)}
        run = StepPass(tape, pipe._placement, orders, losses)
        with call.watched(), _put_aside(pipe.parameters()):
            total = run.run_step()
            _take_gradients(pipe.parameters(), total)
        if pipe.training:
            pipe._notices.end_batch(pipe.cuts, run.called)
        loss, factor = losses.finish()
        run.observers.step_ended(loss)
        total.multiply(factor)
        inputs = run.input_gradients([True] * len(call.inputs))
        _accumulate(total, [(t, g) for t, g in zip(call.inputs, inputs, strict=True) if g is not None])
        call.forget_arguments()
        return loss

    def evaluate(self, pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the loss of a mini-batch, from the output for all of it."""
        if not self.loss_of.takes_target:
            return self.loss_of(pipe(*args, **kwargs), None)
        inputs, more, target = self.loss_of.apart(args, kwargs)
        return self.loss_of(pipe(*inputs, **more), target)

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of the model among those of a step."""
        return self.loss_of.apart(args, kwargs)[:2] if self.loss_of.takes_target else (args, kwargs)


@contextlib.contextmanager
def _put_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters have no ``.grad`` meanwhile."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, gradient in kept:
            if gradient is not None:
                parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _take_gradients(parameters: Iterable[Tensor], total: GradientSum) -> None:
    """Add what a backward inside the backward has left in ``.grad``, as that of reversible layers does."""
    found = [parameter for parameter in parameters if parameter.grad is not None]
    total.add(found, [parameter.grad for parameter in found])
    for parameter in found:
        parameter.grad = None


def _accumulate(total: GradientSum, inputs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to ``.grad``, and call the hooks of parameters; what the caller computed inputs of learns, too."""
    pairs = [*total.take_all(), *inputs]
    if not pairs:
        return
    tensors, gradients = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
    pairs.clear()
    with torch.enable_grad():
        end = _Handover.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    torch.autograd.backward(end, torch.empty(0, device="cpu"))


class _Handover(torch.autograd.Function):
    """Hands over gradients as results of autograd: what only it refers to becomes ``.grad`` without a copy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return (None, *gradients)


def scale_of(scaler: Any, device: torch.device) -> float:
    """Return what a gradient scaler multiplies losses by, which are on ``device``."""
    if scaler is None:
        return 1.0
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, but got {type(scaler).__name__}")
    scaler.scale(torch.zeros((), device=device))  # so that there is a scale
    return float(scaler.get_scale()) if scaler.is_enabled() else 1.0
