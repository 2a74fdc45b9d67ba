"""Follow torch's schedules: each call is a pass, and what it calls of its stages are tasks, as in our own engines.

::

    schedule.step(batch)
      first call: shapes are found out with a forward, and in newer torch a backward: no tasks
      stage.forward_one_chunk(i)           forward   ┐ with the loss, in the last stage: until the schedule has it
      schedule._maybe_compute_loss(...)              ┘
      stage.backward_one_chunk(i)          backward; of its inputs only, where a schedule splits it
      stage.backward_weight_one_chunk(i)   weight

The stages of a `DistributedPipeline` set the context themselves, and are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipesight import context
from pipesight._logger import own_logger
from pipesight._nested import tensors_in
from pipesight._patches import Patches
from pipesight._torch.autograd import next_sequence_number
from pipesight._torch.bare_schedules import (
    CLASSES,
    COMPUTES_LOSS,
    HAND_BUILT,
    REHEARSAL,
    SCHEDULE,
    STAGE,
    batch_dim,
    class_name,
    computes_loss,
    has_backward,
    kept_of_forward,
    last_loss,
    microbatches,
    missing_names,
    peer_rank,
    stages_of,
)
from pipesight._torch.tensors import without_function_overrides
from pipesight.context import Kept, MicrobatchToken, Observers, Phase, Where
from pipesight.pipeline.minibatch import next_serial
from pipesight.pipeline.workers import annotate
from pipesight.recording.torch_pipelines.rank_messages import RankMessages
from pipesight.recording.torch_pipelines.stage_layers import LayerWatch, layers_in
from pipesight.recording.torch_pipelines.torch_pipeline import TorchPipeline
from pipesight.schedule.supported_schedules import by_name

__all__ = ["ScheduleHooks"]

logger = own_logger(__name__)


class ScheduleHooks:
    """Sets the context while schedules of ``torch.distributed.pipelining`` run, until `remove`.

    Args:
        rehearses: Called with true before a stage runs on meaningless values, to find out shapes; with false after it.
    """

    def __init__(self, rehearses: Callable[[bool], None]) -> None:
        self._rehearses = rehearses
        self._patches = Patches()
        self._messages = RankMessages()
        self._layers = LayerWatch()
        self._pipelines: list[TorchPipeline] = []
        self._pass: _Pass | None = None
        if missing := missing_names():
            logger.warning(
                "pipelines of torch.distributed.pipelining are not recorded: torch %s has no %s; use torch 2.6 to "
                "2.15, or pipesight.distributed.DistributedPipeline",
                torch.__version__,
                ", ".join(missing),
            )
            return
        for schedule_class in CLASSES:
            self._patches.wrap(schedule_class, "step", self._step)
        if hasattr(SCHEDULE, COMPUTES_LOSS):
            self._patches.wrap(SCHEDULE, COMPUTES_LOSS, self._loss)
        self._patches.wrap(STAGE, "forward_one_chunk", self._forward)
        self._patches.wrap(STAGE, "backward_one_chunk", partial(self._backward, "backward"))
        self._patches.wrap(STAGE, "backward_weight_one_chunk", partial(self._backward, "weight"))
        for name in REHEARSAL:
            self._patches.wrap(HAND_BUILT, name, self._rehearsal)
        self._messages.attach(self._patches, STAGE)

    def remove(self) -> None:
        """Leave torch, and the layers, as they were."""
        self._patches.undo()
        self._layers.remove()
        self._pipelines.clear()

    def _step(self, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        stages = stages_of(schedule)
        inside = self._pass is not None or context.current() is not None
        if inside or any(getattr(stage, "sets_context", False) for stage in stages):
            return original(schedule, *args, **kwargs)
        entered = self._pass = self._entered(schedule, stages, args, kwargs)
        self._messages.here = entered.here
        context.enter_thread(entered.where)
        entered.where.observers.pass_started()
        try:
            result = original(schedule, *args, **kwargs)
            self._tell_loss(entered, schedule)
            return result
        finally:
            entered.end_task()
            self._pass = None
            self._messages.end_pass()
            entered.where.observers.pass_ended()

    def _tell_loss(self, entered: _Pass, schedule: Any) -> None:
        """Tell observers the loss of a mini-batch that trains: the mean of its micro-batches."""
        if entered.losses and has_backward(schedule):
            with without_function_overrides(), torch.no_grad():
                entered.where.observers.step_ended(torch.stack(entered.losses).mean())

    def _entered(self, schedule: Any, stages: Sequence[Any], args: Any, kwargs: Any) -> _Pass:
        pipeline = self._pipeline(schedule, stages)
        where = Where()
        where.step = context.step_of_call(pipeline, pipeline.steps)
        if not pipeline.learns:  # this rank has no optimizer that could count
            context.catch_up(pipeline.first_step + pipeline.steps)
            where.step = max(where.step, pipeline.first_step + pipeline.steps)
        where.observers = context.observers()
        where.serial = next_serial()
        where.microbatches, where.partitions = pipeline.chunks, pipeline.partitions
        where.pipe = pipeline.pipe
        first = next(tensors_in((args, kwargs)), None)
        dim = batch_dim(schedule) if args else 0
        where.samples = first.shape[dim] if first is not None and dim < first.ndim else 0
        device = torch.device(stages[0].device)
        where.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        pipeline.steps += has_backward(schedule)
        return _Pass(where, microbatches(schedule), waits_for_loss=computes_loss(schedule))

    def _pipeline(self, schedule: Any, stages: Sequence[Any]) -> TorchPipeline:
        """Return what is known of a pipeline: a program may make a schedule for each step."""
        kind = by_name(class_name(schedule))
        name = class_name(schedule) if kind is None else kind.name
        modules = {stage.stage_index: stage.submod for stage in stages}
        for known in self._pipelines:
            same = (known.schedule, known.chunks, known.stages) == (name, microbatches(schedule), modules)
            if same:
                return known
        members = dist.get_process_group_ranks(stages[0].group or dist.group.WORLD)
        pipeline = TorchPipeline(
            schedule=name,
            chunks=microbatches(schedule),
            partitions=int(stages[0].num_stages),
            ranks=[members[peer_rank(stages[0], j)] for j in range(stages[0].num_stages)],
            stages=modules,
            layers={j: layers_in(module) for j, module in modules.items()},
            devices={stage.stage_index: str(stage.device) for stage in stages},
            first_step=context.counted_step() or 0,
        )
        for layers in pipeline.layers.values():
            self._layers.add(layers)
        self._pipelines.append(pipeline)
        return pipeline

    def _rehearsal(self, original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any) -> Any:
        self._rehearses(True)
        try:
            return original(stage, *args, **kwargs)
        finally:
            self._rehearses(False)

    def _forward(self, original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any) -> Any:
        entered = self._entering(stage)
        if entered is None:
            return original(stage, *args, **kwargs)
        self._layers.begin_task()
        entered.begin_task("forward", stage, _chunk(args, kwargs))
        try:
            output = original(stage, *args, **kwargs)
        except BaseException as error:
            entered.fail(error)
            raise
        if stage.has_backward:
            entered.here().kept = partial(_kept, stage, _chunk(args, kwargs))
        if not (stage.is_last and entered.waits_for_loss):
            entered.end_task()
        return output

    def _loss(self, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        entered = self._pass
        if entered is None or entered.here().phase != "forward":
            return original(schedule, *args, **kwargs)
        where = entered.here()
        where.layer = "loss_fn"
        where.marks.append((next_sequence_number(), "loss_fn"))
        try:
            result = original(schedule, *args, **kwargs)
        except BaseException as error:
            entered.fail(error)
            raise
        if where.kept is not None:
            where.kept = partial(_with_loss, where.kept, schedule, args[2:])
        entered.end_task()
        loss = last_loss(schedule)
        if type(loss) is torch.Tensor and loss.numel() == 1:
            entered.losses.append(loss.detach().reshape(()))
        return result

    def _backward(self, phase: Phase, original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any) -> Any:
        entered = self._entering(stage)
        if entered is None or not stage.has_backward:
            return original(stage, *args, **kwargs)
        where = entered.here()
        entered.begin_task(phase, stage, _chunk(args, kwargs))
        observers = where.observers
        if phase == "weight" and not stage.is_first:
            where.observers = Observers(())  # weights come one after the other, in no order of layers
        try:
            # Hooks on the graph read the context of their thread, which on a GPU would be one of autograd's.
            with torch.autograd.set_multithreading_enabled(False):
                result = original(stage, *args, **kwargs)
            where.end_layer()
            where.gradients = partial(_waiting, stage)
        except BaseException as error:
            where.observers = observers
            entered.fail(error)
            raise
        where.observers = observers
        entered.end_task()
        return result

    def _entering(self, stage: Any) -> _Pass | None:
        entered = self._pass
        if entered is None or getattr(stage, "sets_context", False):
            return None
        entered.end_task()  # a forward whose loss was never computed
        return entered


class _Pass:
    """One call of a schedule. It may run a forward and a backward in two threads, each of which has a place."""

    def __init__(self, where: Where, chunks: int, *, waits_for_loss: bool) -> None:
        self.where, self.waits_for_loss = where, waits_for_loss
        self.losses: list[torch.Tensor] = []
        self._places = {threading.get_ident(): where}
        self._tokens = [MicrobatchToken(i) for i in range(chunks)]

    def here(self) -> Where:
        """Return the place of the calling thread."""
        where = self._places.get(threading.get_ident())
        if where is None:
            where, whole = Where(), self.where
            where.step, where.serial, where.pipe, where.samples = whole.step, whole.serial, whole.pipe, whole.samples
            where.partitions, where.microbatches = whole.partitions, whole.microbatches
            where.observers, where.stream = whole.observers, whole.stream
            self._places[threading.get_ident()] = where
            context.enter_thread(where)
        return where

    def begin_task(self, phase: Phase, stage: Any, i: int) -> None:
        """Begin a task of a stage."""
        token = self._tokens[i] if i < len(self._tokens) else MicrobatchToken(i)
        self.here().begin_task(phase, stage.stage_index, i, stage.device, token)

    def end_task(self) -> None:
        """End the task under way in this thread, if there is one."""
        where = self.here()
        if where.phase is None:
            return
        if where.observers.members:
            where.observers.task_ended(where)
        where.phase = None
        where.kept = where.gradients = None  # they hold tensors

    def fail(self, error: BaseException) -> None:
        """End the task, and note on the error where it was raised."""
        annotate(error, self.here())
        self.end_task()


def _kept(stage: Any, i: int) -> Kept:
    """Return what a stage keeps of a micro-batch for its backward."""
    ends, inputs, outputs = kept_of_forward(stage, i)
    return Kept(list(tensors_in(inputs)), list(tensors_in(ends)), outputs=list(tensors_in(outputs)))


def _with_loss(kept: Callable[[], Kept], schedule: Any, targets: Any) -> Kept:
    """Return the same with the loss of a micro-batch, the last that was computed, and what it was computed from."""
    found = kept()
    ends = [*found.ends, *tensors_in([last_loss(schedule)])]
    return Kept([*found.inputs, *tensors_in(targets)], ends, outputs=found.outputs)


def _waiting(stage: Any) -> list[Tensor]:
    """Return the gradients that weights wait for, where their part of a backward comes later."""
    found = []
    for _, groups, _, gradients in getattr(stage, "backward_state", {}).values():
        found += [*tensors_in(gradients), *tensors_in([group.get("grads") for group in groups or ()])]
    return found


def _chunk(args: Any, kwargs: Any) -> int:
    """Return the number of the micro-batch that a stage is given."""
    found = args[0] if args else kwargs.get("fwd_chunk_id", kwargs.get("bwd_chunk_id", 0))
    return int(found)
