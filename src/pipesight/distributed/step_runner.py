"""One call of a pipeline on this rank: the ranks agree on it, torch's schedule runs it, its loss is checked if due."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipesight import context
from pipesight.context import Where
from pipesight.distributed import schedules
from pipesight.distributed.agreement import Agreement, Message
from pipesight.distributed.failures import RankFailedError, RankMonitor
from pipesight.distributed.loss_check import LossCheck, collect
from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.minibatch import BatchLoss, MiniBatch
from pipesight.distributed.saving import Preemption
from pipesight.distributed.shapes import Flow
from pipesight.distributed.step_inputs import StepInputs
from pipesight.distributed.symptoms import is_symptom
from pipesight.distributed.transfers import TransferringStage
from pipesight.pipeline.minibatch import next_serial
from pipesight.pipeline.randomness import PassRandomness, begin_task, end_task, isolated
from pipesight.schedule.argument_checks import CheckpointMode, checkpoint_stop
from pipesight.schedule.supported_schedules import RankSchedule

__all__ = ["CallRunner", "ScheduleRunner", "StepRunner"]


class CallRunner:
    """What all calls of a pipeline have in common; it counts them."""

    def __init__(
        self,
        module: nn.Module,
        mesh: PipelineMesh,
        schedule_runner: ScheduleRunner,
        agreement: Agreement,
        monitor: RankMonitor,
        where: Where,
        checkpoint: CheckpointMode,
    ) -> None:
        self._module, self._mesh, self._schedule_runner = module, mesh, schedule_runner
        self._agreement, self._monitor, self._where, self._checkpoint = agreement, monitor, where, checkpoint
        self.preemption = Preemption()
        self.steps = 0
        """How many training steps there were, those before a restart included."""
        self._calls = self._since = 0  # all calls; those since the last training step

    def _enter_step(self, step: int, counted: list[int]) -> None:
        """Set the step of the context to that of the ranks that count: one without parameters has no optimizer."""
        self._where.step = step
        if counted and context.counted_step() is not None:
            self._where.step = max(counted)
            context.catch_up(max(counted))

    def _enter_pass(self, samples: int, m: int, n: int, learns: bool) -> Where:
        """Set the context to a pass of so many samples, micro-batches and partitions."""
        mesh, where = self._mesh, self._where
        where.observers = context.observers()
        where.serial = next_serial()
        where.samples, where.microbatches, where.partitions = samples, m, n
        where.stream = torch.cuda.current_stream(mesh.device) if mesh.device.type == "cuda" else None
        stop = checkpoint_stop(self._checkpoint, m)
        where.checkpoint_stop = stop if learns and self._module.training else 0
        return where

    def _randomness(self, seed: int) -> PassRandomness:
        devices = (torch.device("cpu"), self._mesh.device)
        return PassRandomness(dict.fromkeys(devices, seed + self._mesh.replica))

    def loss(self, batch: MiniBatch, *, everywhere: bool) -> Tensor | None:
        """Return the loss of the whole batch, on the last rank or everywhere."""
        loss = torch.stack(list(batch.loss.values.values())).sum() if self._schedule_runner.is_last else None
        with self._monitor.explaining("the loss"):
            shared = self._mesh.share_loss(loss, everywhere=everywhere)
        if shared is not None and batch.learns:
            self._where.observers.step_ended(shared)
        return shared


class StepRunner(CallRunner):
    """Makes the calls of a pipeline of layers."""

    def __init__(self, inputs: StepInputs, *settings: Any) -> None:
        super().__init__(*settings)
        self._inputs = inputs
        self._check = LossCheck(inputs.loss_weights, len(inputs.mesh.pipelines))

    def run(
        self,
        pipeline: Any,
        call: str,
        batch: tuple[Any, Any],
        *,
        learns: bool,
        with_target: bool = True,
        scale: float | None = None,
    ) -> MiniBatch:
        """Run one call; ``batch`` is input and target, ``scale`` what the loss is multiplied by."""
        with self._monitor.presence.calls.running(call, self._calls + 1):
            return self._run(pipeline, call, batch, learns, with_target, scale)

    def _run(
        self, pipeline: Any, call: str, batch: tuple[Any, Any], learns: bool, with_target: bool, scale: float | None
    ) -> MiniBatch:
        step = context.step_of_call(pipeline, self.steps)
        message: Message = {"call": f"{call} {self._calls}", "arguments": {"scale": scale}}
        message["mode"] = self._inputs.skeleton.mode
        message |= {"leaves": self.preemption.asked, "step": context.counted_step()}
        error: Exception | None = None
        inputs: list[tuple[Tensor, ...]] = []
        targets: list[Any] = []
        weights: list[float] = []
        try:
            if self._schedule_runner.is_first:
                inputs = self._inputs.read_input(batch[0], call, message)
            if self._schedule_runner.is_last and with_target:
                targets, weights = self._inputs.read_target(batch[1], call, message)
                message["check"] = self._check.due(call, len(targets))
        except Exception as found:
            error = found
        messages = self._agreement.settle(message, error)
        if any(answer["leaves"] for answer in messages.values()):
            self.preemption.leave()
        self._calls += 1
        flows, seed = self._inputs.agree(messages, with_target, (self.steps, self._since))
        checks = any(answer.get("check") for answer in messages.values())
        self._enter_step(step, [answer["step"] for answer in messages.values() if answer["step"] is not None])
        if with_target and self._inputs.loss_weights.takes_output:
            weights, messages = self._weigh(targets, flows)
        share, factor = self._inputs.share(messages), 1.0 if scale is None else scale
        loss = BatchLoss(self._inputs.loss_weights.loss_fn, targets, weights, share, factor)
        loss.evidence = collect(flows) if checks and targets else None
        minibatch = self._minibatch(flows, inputs, loss, seed, learns)
        self.steps, self._since = self.steps + learns, 0 if learns else self._since + 1
        self._schedule_runner.run(minibatch)
        if checks:
            self._verify(minibatch, call)
        elif targets:
            self._check.passed(call)
        return minibatch

    def _weigh(self, targets: list[Any], flows: list[Flow]) -> tuple[list[float], dict[int, Message]]:
        """Weigh micro-batches by the user's function, now that shapes are known; let the ranks agree again."""
        message: Message = {"call": f"loss_weight {self._calls}"}
        weights: list[float] = []
        error: Exception | None = None
        try:
            if targets:
                weights = self._inputs.weigh(targets, flows, message)
        except Exception as found:
            error = found
        return weights, self._agreement.settle(message, error)

    def _minibatch(
        self, flows: list[Flow], inputs: list[tuple[Tensor, ...]], loss: BatchLoss, seed: int, learns: bool
    ) -> MiniBatch:
        samples = sum(flow.cuts[0].output[0].shape[0] for flow in flows)
        where = self._enter_pass(samples, len(flows), len(self._inputs.skeleton.partitions), learns)
        random = self._randomness(seed)
        return MiniBatch(flows, inputs, loss, learns, random, where, where.observers, self._monitor)

    def _verify(self, batch: MiniBatch, call: str) -> None:
        """Raise on every rank if the losses of micro-batches do not add up to that of the batch."""
        error: Exception | None = None
        loss = batch.loss
        if loss.evidence is not None:
            inside = Where()
            inside.phase = "forward"  # so that hooks on all modules, those of tracing among them, ignore these
            context.enter_thread(inside)
            begin_task(batch.randomness, (0, len(self._inputs.skeleton.partitions), "check"))
            try:
                with isolated():
                    if self._check.verify(loss.evidence, loss.targets, loss.weights, loss.share * loss.scale):
                        self._check.passed(call)
            except ValueError as found:
                error = found
            finally:
                end_task()
                inside.phase = None
                context.enter_thread(self._where)
        self._agreement.settle({"call": f"check of {call} {self._calls}"}, error)


class ScheduleRunner:
    """Runs torch's schedules over the stages of this rank, for any number of micro-batches."""

    def __init__(self, kind: RankSchedule, stages: Sequence[TransferringStage], ranks: int) -> None:
        self._kind, self._stages, self._ranks = kind, stages, ranks
        self._schedules: dict[int, tuple[Any, NDArray[np.bool_]]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first partition."""
        return bool(self._stages[0].is_first)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last partition."""
        return bool(self._stages[-1].is_last)

    def run(self, batch: MiniBatch) -> None:
        """Run all tasks of this rank, and merge the gradients of replicas."""
        m = len(batch.flows)
        schedule, split = self._schedule(m)
        for stage in self._stages:
            stage.begin(batch, split[stage.j].tolist())
        context.enter_thread(batch.where)
        numbers = torch.arange(m) if self._stages[-1].is_last else None
        run = schedule.step if batch.learns else schedule.eval
        batch.observers.pass_started()
        try:
            with isolated():
                # As in GPipe, tasks do not change the context variables of the caller, such as the open span.
                contextvars.copy_context().run(run, target=numbers, return_outputs=False)
            with batch.monitor.explaining("other replicas"):
                for stage in self._stages:
                    if stage.averaging is not None and batch.learns:
                        stage.averaging.finish()
        except BaseException as error:
            self._schedules.clear()  # they hold the remains of this step
            if isinstance(error, RankFailedError):
                raise
            if is_symptom(error):  # of a collective in a layer, a hook or the loss
                raise batch.monitor.explain(error) from None
            batch.monitor.fail(error)
            raise
        finally:
            batch.where.phase = None
            batch.observers.pass_ended()
            for stage in self._stages:
                stage.clear_runtime_states()
                if not batch.learns:
                    stage.reshard()

    def _schedule(self, m: int) -> tuple[Any, NDArray[np.bool_]]:
        """Return what runs this number of micro-batches, and which backwards it splits."""
        if m not in self._schedules:
            order = self._kind.order_of(m, self._ranks, self._stages[0].num_stages)
            schedule = schedules.make(order, self._stages, _no_loss)
            self._schedules[m] = schedule, order.split
        return self._schedules[m]


def _no_loss(_output: Any, _number: Tensor) -> Tensor:
    """Replace the loss in torch's schedules: stages compute it themselves, as part of the forward."""
    return torch.empty(())
