"""What a run took: its schedule, and the costs of its layers, for plans.

Plans are about the usual step, so only the steps in the middle, by their length, are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipesight.plan.blocks import Setting
from pipesight.plan.costs import Costs, Link
from pipesight.plan.layers import MICROSECOND, layers_of
from pipesight.plan.schedules import B, F, R, Schedule, gpipe, recomputed
from pipesight.plan.simulation import Times, simulate
from pipesight.plan.windows import Windows
from pipesight.report.analysis.facts import PipelineFacts, device_of_partition, pipelines_of, replicas_in
from pipesight.report.analysis.links import Messages, messages_of
from pipesight.report.analysis.windows import TRAINING, MiniBatches, Steps, find_minibatches, find_steps, replicas_of
from pipesight.report.reading.tables import Column, Transfers

if TYPE_CHECKING:
    from pipesight.report.reading.run import Run

__all__ = ["Measured", "NoTasksError", "measure"]

USUAL = (40, 60)
"""Percentiles of the length of steps; those between them are usual."""


class NoTasksError(ValueError):
    """A run has nothing to plan by."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The recorded schedule: what it took, what the simulator makes of it, and the costs that it tells. In seconds."""

    costs: Costs
    facts: PipelineFacts
    schedule: Schedule
    checkpoint: str
    balance: tuple[int, ...]
    steps: int
    """How many there were."""
    step_seconds: float
    """The median, from the first forward of a step to that of the next."""
    window_seconds: float
    bubble: float
    begin: Times
    """When the tasks of a usual mini-batch ran, by kind, partition and micro-batch; NaN where there is none."""
    end: Times
    predicted_seconds: float
    """What simulating it gives for the step."""
    predicted_bubble: float

    @property
    def schedule_name(self) -> str:
        """Its name, as far as it is known."""
        return self.facts.schedule or ("gpipe" if self.setting is not None else "unknown")

    @property
    def devices(self) -> int:
        """How many plans are for by default: ranks, or partitions, of which each is to have a device."""
        return self.schedule.stages if self.facts.ranks is None else self.schedule.devices

    @property
    def setting(self) -> Setting | None:
        """The setting that it was, if it was one that plans can have: GPipe, and a device for each partition."""
        n, m = self.schedule.stages, self.schedule.chunks
        same = gpipe(n, m, recompute=recomputed(self.checkpoint, m))
        if self.schedule.devices != n or not np.array_equal(same.order, self.schedule.order):
            return None
        return Setting("gpipe", n, m, self.checkpoint)


def measure(run: Run, *, link: Link | None = None) -> Measured:
    """Read what a run took.

    Args:
        run: An open one.
        link: The way between devices that plans are to have; by default as fast as it was.

    Raises:
        NoTasksError: No mini-batch went through a pipeline, and back, as a whole.
    """
    every = run.tasks()
    if not len(every):
        raise NoTasksError(f"the run has no tasks of a pipeline ({run.path}); record one that trains a pipesight.GPipe")
    facts = pipelines_of(run.description)
    replicas = replicas_of(every, replicas_in(facts))
    sizes = {fact.partitions for fact in facts}
    minibatches, tasks = find_minibatches(every, partitions=sizes, replicas=replicas)
    steps, minibatches = find_steps(minibatches, run.spans(), replicas)
    own = minibatches.where(_alike(minibatches))
    if not len(own):
        raise NoTasksError(
            f"the run has no mini-batch with the forwards and backwards of all tasks ({run.path}); "
            "record at least one whole training step"
        )
    n, m = int(own.partitions[0]), int(own.chunks[0])
    fact = next((fact for fact in facts if fact.partitions == n), PipelineFacts(n))
    homes = device_of_partition(fact, tasks, n)
    period, outside, per_step, usual = _steps(steps, own)
    window, whole = Windows(own.where(usual), tasks, homes), Windows(own, tasks, homes)
    found = layers_of(run, fact, every, whole.whole_lengths(), window.whole_lengths(), m)
    transfers = run.transfers()
    besides = found.besides * MICROSECOND
    # A backward that hands its gradient on before it ends lets the next begin early. More tasks would not gain more.
    waited, measured_link = (
        _between_devices(transfers) if fact.ranks is None else _between_ranks(messages_of(own, tasks, transfers))
    )
    # Of a task and its way back, half of that is in the gap of each; plans have links instead.
    gaps = np.maximum(window.mean_gaps() - waited / (2 * len(own) * n * m), 0.0) * MICROSECOND
    again = R if window.checkpoint != "never" else F  # what was not recorded is like a forward
    even = float(simulate(window.schedule, window.durations(), delays=window.delays()).makespan)
    uneven = simulate(window.schedule, window.own_durations(), delays=window.delays()[..., None]).makespan
    makespan = max(even, float(uneven.mean()))
    begin, end = window.example()
    return Measured(
        costs=Costs(
            found.layers,
            samples=fact.batch_size,
            forward_overhead=float(besides[F]),
            recompute_overhead=float(besides[again]),
            backward_overhead=float(besides[B]),
            forward_gap=float(gaps[F]),
            recompute_gap=float(gaps[again]),
            backward_gap=float(gaps[B]),
            loss=window.loss * MICROSECOND,
            jitter=makespan / even,
            outside=outside * MICROSECOND,
            minibatches=per_step,
            weight_share=found.weight_share,
            link=measured_link if link is None else link,
            notes=found.notes,
        ),
        facts=fact,
        schedule=window.schedule,
        checkpoint=window.checkpoint,
        balance=found.balance,
        steps=len(steps),
        step_seconds=period * MICROSECOND,
        window_seconds=float(np.median(own.end - own.begin)) * MICROSECOND,
        bubble=window.bubble(),
        begin=begin * MICROSECOND,
        end=end * MICROSECOND,
        predicted_seconds=(per_step * makespan + outside) * MICROSECOND,
        predicted_bubble=window.bubble(makespan),
    )


def _alike(minibatches: MiniBatches) -> Column:
    """Return the rows of the mini-batches of training that most others are like, of the first replica."""
    training = np.flatnonzero((minibatches.kind == TRAINING) & (minibatches.replica == 0))
    shape = np.stack([minibatches.partitions, minibatches.chunks, minibatches.count])[:, training]
    _, which, counts = np.unique(shape, axis=1, return_inverse=True, return_counts=True)
    return training[which.ravel() == np.argmax(counts)] if len(training) else training


def _steps(steps: Steps, minibatches: MiniBatches) -> tuple[float, float, int, Column]:
    """Return the median step, what of it is outside of mini-batches, how many it has, and which of them are usual.

    Times are in microseconds. A step whose successor was not recorded has no length, so long as there are others.
    """
    mine = np.isin(steps.step, minibatches.step) & steps.complete.astype(bool) & (steps.replica == 0)
    followed = mine & steps.follows
    chosen = steps.where(followed if followed.any() else mine)
    lengths = chosen.end - chosen.begin
    low, high = np.percentile(lengths, USUAL)
    usual = chosen.where((lengths >= low) & (lengths <= high))
    rows = np.isin(minibatches.step, usual.step)
    if not rows.any():
        rows = np.ones(len(minibatches), bool)
    per_step = max(1, round(float(usual.count.mean())))
    inside = per_step * float((minibatches.end - minibatches.begin)[rows].mean())
    return float(np.median(lengths)), max(float((usual.end - usual.begin).mean()) - inside, 0.0), per_step, rows


def _between_devices(transfers: Transfers) -> tuple[float, Link]:
    """Return how many microseconds transfers took in all, and a link that is as fast as they were."""
    taken = float((transfers.end - transfers.begin).sum()) if len(transfers) else 0.0
    return taken, _link(float(transfers.size.sum()) if len(transfers) else 0.0, taken)


def _between_ranks(messages: Messages) -> tuple[float, Link]:
    """Return the same of messages: ranks wait for them before they are sent, too, but that is no time on the way."""
    timed = messages.where(messages.waiting.astype(bool))
    return float(messages.wait.sum()), _link(float(timed.size.sum()), float(timed.time.sum()))


def _link(size: float, microseconds: float) -> Link:
    return Link(bandwidth=size / (microseconds * MICROSECOND)) if size > 0 and microseconds > 0 else Link()
