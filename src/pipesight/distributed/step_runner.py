"""One call of a pipeline on this rank: the ranks agree on it, run it, and check its loss where that is due."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesight import context
from pipesight.context import Where
from pipesight.distributed import schedules
from pipesight.distributed.agreement import Agreement, Message
from pipesight.distributed.failures import RankFailedError, Watch
from pipesight.distributed.loss_check import LossCheck, collect
from pipesight.distributed.loss_weights import Weighing
from pipesight.distributed.mesh import Places
from pipesight.distributed.minibatch import Minibatch
from pipesight.distributed.saving import Preemption
from pipesight.distributed.shapes import Flow, Skeleton
from pipesight.distributed.stage import Stage
from pipesight.distributed.step_inputs import Planner
from pipesight.distributed.symptoms import is_symptom
from pipesight.pipeline.minibatch import next_serial
from pipesight.pipeline.randomness import PassRandomness, begin_task, end_task, isolated
from pipesight.schedule.rank_schedules import RankSchedule

__all__ = ["Execution", "Runner"]


class Runner:
    """Makes the calls of a pipeline, and counts them.

    Args:
        module: The layers of this rank.
        skeleton: The whole model without its memory.
        places: The ranks.
        planner: Makes a plan of what the ranks tell each other.
        weighing: The loss, and what its micro-batches count.
        execution: Runs the stages of this rank.
        agreement: Exchanges messages.
        watch: Knows of the other ranks.
        where: The place of this rank.
        checkpoint: As for the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        skeleton: Skeleton,
        places: Places,
        planner: Planner,
        weighing: Weighing,
        execution: Execution,
        agreement: Agreement,
        watch: Watch,
        where: Where,
        checkpoint: str,
    ) -> None:
        self._module, self._skeleton, self._places, self._planner = module, skeleton, places, planner
        self._weighing, self._execution, self._agreement, self._watch = weighing, execution, agreement, watch
        self._where, self._checkpoint = where, checkpoint
        self._check = LossCheck(weighing, len(places.lines))
        self.farewell = Preemption()
        self.steps = 0
        """How many training steps there were, those before a restart included."""
        self._calls = self._since = 0  # all calls; those since the last training step

    def run(
        self,
        pipeline: Any,
        call: str,
        batch: tuple[Any, Any],
        *,
        learns: bool,
        with_target: bool = True,
        scale: float | None = None,
    ) -> Minibatch:
        """Run one call; ``batch`` is input and target, ``scale`` what the loss is multiplied with."""
        with self._watch.calls.running(call, self._calls + 1):
            return self._run(pipeline, call, batch, learns, with_target, scale)

    def _run(
        self, pipeline: Any, call: str, batch: tuple[Any, Any], learns: bool, with_target: bool, scale: float | None
    ) -> Minibatch:
        step = context.step_of_call(pipeline, self.steps)
        message: Message = {"call": f"{call} {self._calls}", "mode": self._skeleton.mode, "arguments": {"scale": scale}}
        message |= {"leaves": self.farewell.asked, "step": context.counted_step()}
        error: Exception | None = None
        inputs: list[tuple[Tensor, ...]] = []
        targets: list[Any] = []
        weights: list[float] = []
        try:
            if self._execution.is_first:
                inputs = self._planner.read_input(batch[0], call, message)
            if self._execution.is_last and with_target:
                targets, weights = self._planner.read_target(batch[1], call, message)
                message["check"] = self._check.due(call, len(targets))
        except Exception as found:
            error = found
        messages = self._agreement.settle(message, error)
        if any(answer["leaves"] for answer in messages.values()):
            self.farewell.leave()
        self._calls += 1
        flows, seed = self._planner.plan(messages, with_target, (self.steps, self._since))
        checks = any(answer.get("check") for answer in messages.values())
        if with_target and self._weighing.takes_output:
            weights, messages = self._weigh(targets, flows)
        share = self._planner.share(messages)
        self._enter_step(step, [answer["step"] for answer in messages.values() if answer.get("step") is not None])
        minibatch = self._minibatch(flows, inputs, targets, seed, learns)
        minibatch.weights, minibatch.share, minibatch.scale = weights, share, 1.0 if scale is None else scale
        if checks and targets:
            minibatch.evidence = collect(flows)
        self.steps, self._since = self.steps + learns, 0 if learns else self._since + 1
        self._execution.run(minibatch)
        if checks:
            self._verify(minibatch, call)
        elif targets:
            self._check.passed(call)
        return minibatch

    def loss(self, batch: Minibatch, *, everywhere: bool) -> Tensor | None:
        """Return the loss of the whole batch, on the last rank or everywhere."""
        loss = torch.stack(list(batch.losses.values())).sum() if self._execution.is_last else None
        with self._watch.explaining("the loss"):
            return self._places.share_loss(loss, everywhere=everywhere)

    def _weigh(self, targets: list[Any], flows: list[Flow]) -> tuple[list[float], dict[int, Message]]:
        """Weigh micro-batches by a function of the user's, now that shapes are known; let the ranks agree again."""
        message: Message = {"call": f"loss_weight {self._calls}"}
        weights: list[float] = []
        error: Exception | None = None
        try:
            if targets:
                weights = self._planner.weigh(targets, flows, message)
        except Exception as found:
            error = found
        return weights, self._agreement.settle(message, error)

    def _verify(self, batch: Minibatch, call: str) -> None:
        """Raise on every rank if the losses of micro-batches do not add up to that of the batch."""
        error: Exception | None = None
        if batch.evidence is not None:
            inside = Where()
            inside.phase = "forward"  # so that hooks on all modules, those of tracing among them, let these alone
            context.enter_thread(inside)
            begin_task(batch.randomness, (0, len(self._skeleton.partitions), "check"))
            try:
                with isolated():
                    if self._check.verify(batch.evidence, batch.targets, batch.weights, batch.share * batch.scale):
                        self._check.passed(call)
            except ValueError as found:
                error = found
            finally:
                end_task()
                inside.phase = None
                context.enter_thread(self._where)
        self._agreement.settle({"call": f"check of {call} {self._calls}"}, error)

    def _enter_step(self, step: int, counted: list[int]) -> None:
        """Be at the step that the ranks are at which count them: one without parameters has no optimizer to count."""
        self._where.step = step
        if counted and context.counted_step() is not None:
            self._where.step = max(counted)
            context.catch_up(max(counted))

    def _minibatch(
        self, flows: list[Flow], inputs: list[tuple[Tensor, ...]], targets: list[Any], seed: int, learns: bool
    ) -> Minibatch:
        m, device = len(flows), self._places.device
        stop = {"always": m, "except_last": m - 1, "never": 0}[self._checkpoint]
        where = self._where
        where.observers = context.observers()
        where.serial = next_serial()
        where.samples = sum(flow.cuts[0].output[0].shape[0] for flow in flows)
        where.microbatches, where.partitions = m, len(self._skeleton.partitions)
        where.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        where.checkpoint_stop = stop if learns and self._module.training else 0
        random = PassRandomness(dict.fromkeys((torch.device("cpu"), device), seed + self._places.replica))
        loss_fn = self._weighing.loss_fn
        return Minibatch(flows, inputs, targets, loss_fn, learns, random, where, where.observers, self._watch)


class Execution:
    """Runs mini-batches, of any number of micro-batches.

    Args:
        kind: The schedule.
        stages: Those of this rank.
        ranks: How many there are in the pipeline.
    """

    def __init__(self, kind: RankSchedule, stages: Sequence[Stage], ranks: int) -> None:
        self._kind, self._stages, self._ranks = kind, stages, ranks
        self._schedules: dict[int, tuple[Any, dict[str, Any]]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first partition."""
        return bool(self._stages[0].is_first)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last partition."""
        return bool(self._stages[-1].is_last)

    def run(self, batch: Minibatch) -> None:
        """Run all tasks of this rank, and merge the gradients of replicas."""
        m = len(batch.flows)
        schedule, settings = self._schedule(m)
        for stage in self._stages:
            stage.begin(batch)
        context.enter_thread(batch.where)
        numbers = torch.arange(m) if self._stages[-1].is_last else None
        run = schedule.step if batch.learns else schedule.eval
        batch.observers.pass_started()
        try:
            with isolated():
                # As workers of GPipe do, tasks leave context variables, such as the open span, as they found them.
                contextvars.copy_context().run(run, target=numbers, **settings)
            with batch.watch.explaining("other replicas"):
                for stage in self._stages:
                    if stage.averaging is not None and batch.learns:
                        stage.averaging.finish()
        except BaseException as error:
            self._schedules.clear()  # they hold what is left of this step
            if isinstance(error, RankFailedError):
                raise
            if is_symptom(error):  # of a collective in a layer, a hook or the loss
                raise batch.watch.explain(error) from None
            batch.watch.fail(error)
            raise
        finally:
            batch.where.phase = None
            batch.observers.pass_ended()
            for stage in self._stages:
                stage.clear_runtime_states()
                if not batch.learns:
                    stage.reshard()

    def _schedule(self, m: int) -> tuple[Any, dict[str, Any]]:
        """Return the schedule for so many micro-batches, and what its calls take."""
        if m not in self._schedules:
            kind = self._kind
            if not kind.fits(m, self._ranks, self._stages[0].num_stages):
                kind = schedules.choose(kind.stand_in)
            schedule = schedules.make(kind, self._stages, m, _no_loss)
            takes = inspect.signature(schedule.step).parameters
            settings = {"return_outputs": False} if "return_outputs" in takes else {}  # not before torch 2.9
            self._schedules[m] = schedule, settings
        return self._schedules[m]


def _no_loss(_output: Any, _number: Tensor) -> Tensor:
    """Stand for the loss in torch's schedules: stages compute it themselves, in the forward that it belongs to."""
    return torch.empty(())
