"""One mini-batch on this rank: torch's schedule runs its stages, and whatever goes wrong reaches the other ranks."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipesight import context
from pipesight.distributed import schedules
from pipesight.distributed.failures import RankFailedError
from pipesight.distributed.minibatch import Minibatch
from pipesight.distributed.stage import Stage
from pipesight.distributed.symptoms import is_symptom
from pipesight.pipeline.randomness import isolated
from pipesight.schedule.rank_schedules import RankSchedule

__all__ = ["Execution"]


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
