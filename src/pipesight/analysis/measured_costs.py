"""What a run took: its schedule, and the costs of its layers, for plans and for the advice of a report.

Both are about the steps that the report counts, and what it measures is what a plan shows as recorded. Costs are those
of the usual step, so of these only the steps in the middle, by their length, are looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipesight.analysis.batch_sizes import sizes_in
from pipesight.analysis.described_pipelines import DescribedPipeline
from pipesight.analysis.layer_costs import MICROSECOND, layer_costs_of
from pipesight.analysis.measured_memory import (
    gradients_of,
    input_bytes,
    other_bytes,
    outside_peak,
    parameter_scale,
)
from pipesight.analysis.measured_tasks import MeasuredTasks
from pipesight.analysis.memory import MemoryReport
from pipesight.analysis.memory_limit import MemoryLimit, limit_of
from pipesight.analysis.rank_links import Messages, messages_of
from pipesight.analysis.transfer_waits import arrivals_of
from pipesight.plan.plans import predict
from pipesight.runs.reading.event_tables import Column, LayerTimes, Tasks, Transfers
from pipesight.schedule.argument_checks import SCHEDULES
from pipesight.schedule.costs import Costs, Link
from pipesight.schedule.setting import Setting
from pipesight.schedule.simulation import Times
from pipesight.schedule.task_orders import B, F, R, Schedule

if TYPE_CHECKING:
    from pipesight.analysis.step_grouping import MiniBatchTable
    from pipesight.analysis.step_times import StepTimes
    from pipesight.analysis.timed_steps import TimedSteps
    from pipesight.runs.reading.run import Run

__all__ = ["Measured", "measure_steps"]

USUAL = 0.2
"""The share of steps that are usual: those whose length is nearest to the median, and at least one."""
ENOUGH = 100
"""At most this many usual mini-batches are used."""
DOUBTFUL = 0.1
"""Where a plan of the recorded setting is so far from its tasks' own times, layers are not known well enough to tell
the parts of backwards apart; plans are then compared with the latter."""
LOSS = "loss_fn"
"""The name of a loss among the layers that keep something."""
SMALL_MESSAGE = 64 * 1024
"""Bytes. Smaller messages take as long as the network needs for any, whatever their size."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The recorded schedule: what it took, what the simulator predicts for it, and the costs behind it. In seconds."""

    costs: Costs
    """What plans are computed from."""
    facts: DescribedPipeline
    """The pipeline as `run.json` describes it."""
    schedule: Schedule
    """The order of tasks that was recorded."""
    checkpoint: str
    """`always`, `except_last` or `never`, as the recomputations show."""
    balance: tuple[int, ...]
    """Layers of each partition."""
    setting: Setting | None
    """The recorded setting, if plans can have it."""
    layers_known: bool
    """Whether layers were recorded, and not only their tasks."""
    steps: int
    """How many there were, without those of the warm-up."""
    step_seconds: float
    """The median, from the first forward of a step to that of the next."""
    window_seconds: float
    """The median, from the first forward of a mini-batch to its last backward."""
    bubble: float
    """The share of the windows in which partitions are idle."""
    begin: Times
    """When the tasks of a usual mini-batch ran, by kind, partition and micro-batch; NaN where there is none."""
    end: Times
    """When these tasks ended."""
    predicted_seconds: float
    """What simulating it gives for the step; what plans save is compared with this."""
    predicted_bubble: float
    """The bubble of that simulation."""
    parameter_scale: float | None
    """Bytes of weights, gradients and optimizer state for each byte of parameters, if they were counted."""
    limit: MemoryLimit | None
    """The memory of the devices, if known."""
    processors: int | None
    """That the partitions of a replica share, if they compute on a CPU."""

    @property
    def error(self) -> float:
        """How far the simulation of the step is from its median, as a share of that."""
        return self.predicted_seconds / self.step_seconds - 1

    @property
    def schedule_name(self) -> str:
        """Its name, as far as it is known."""
        return self.facts.schedule or ("gpipe" if self.setting is not None else "unknown")

    @property
    def devices(self) -> int:
        """The number of devices that plans have by default: one per rank or, in one process, one per partition.

        Partitions that share a worker because the schedule says so, as those of an interleaved one, have one together.
        """
        by_schedule = self.facts.workers is not None and self.schedule.devices > 1
        return self.schedule.devices if self.facts.ranks is not None or by_schedule else self.schedule.stages

    @property
    def rounds(self) -> int:
        """How many stages per device interleaved plans have by default: as many as the run, but at least two."""
        return max(2, self.schedule.stages // self.devices)

    @property
    def crowded(self) -> bool:
        """Whether more partitions, or ranks, compute at once than there are processors."""
        return self.processors is not None and self.schedule.devices > self.processors


def measure_steps(
    run: Run,
    facts: DescribedPipeline,
    steps: TimedSteps,
    tasks: Tasks,
    *,
    bubble: float,
    layers: LayerTimes,
    transfers: Transfers,
    memory: MemoryReport | None = None,
) -> Measured | None:
    """Find the costs of the steps that count; ``None`` if their order cannot be simulated."""
    split, minibatches, times = steps.main_split(), steps.minibatches, steps.counted_times
    if split is None or split.schedule is None:
        return None
    own = minibatches.where(split.rows[minibatches.replica[split.rows] == minibatches.replica[split.rows].min()])
    sizes = sizes_in(own, facts.batch_size)
    if sizes is not None:
        own = own.where(own.samples == facts.batch_size)
    mine = times.where(np.isin(times.step, own.step) & (times.replica == own.replica[0]))
    if not len(mine):
        return None
    n, m = split.schedule.stages, split.schedule.chunks
    usual, rows = _usual(mine, own)
    window, whole = (MeasuredTasks(some, tasks, split.schedule, split.rates) for some in (own.where(rows), own))
    lengths = whole.whole_lengths(computing=False), window.whole_lengths()
    found = layer_costs_of(run, facts, layers, *lengths, m, memory)
    besides = found.besides * MICROSECOND
    # A backward that passes its gradient on before it ends lets the next begin early. More tasks would not gain more.
    waited, each = (
        _between_devices(arrivals_of(own, tasks, transfers))
        if facts.ranks is None
        else _between_ranks(messages_of(own, tasks, transfers))
    )
    link = _link(each, [found.layers[end - 1].output_bytes / m for end in np.cumsum(found.balance)[:-1].tolist()])
    # Of a task and its way back, half of that is in the gap of each; plans have links instead.
    gaps = np.maximum(window.mean_gaps() - waited / (2 * len(own) * n * m), 0.0) * MICROSECOND
    again = R if window.checkpoint != "never" else F  # what was not recorded is like a forward
    even, uneven = window.makespans()
    makespan = max(even, uneven)
    per_step = max(1, round(float(usual.minibatches.mean())))
    gradients = gradients_of(memory, facts, per_step)
    outside = max(float((usual.period - usual.window).mean()), 0.0)
    costs = Costs(
        found.layers,
        samples=facts.batch_size,
        forward_overhead=float(besides[F]),
        recompute_overhead=float(besides[again]),
        backward_overhead=float(besides[B]),
        forward_gap=float(gaps[F]),
        recompute_gap=float(gaps[again]),
        backward_gap=float(gaps[B]),
        loss=window.loss * MICROSECOND,
        loss_outside=facts.ranks is None and facts.workers is None,
        jitter=makespan / even if even > 0 else 1.0,
        outside=outside * MICROSECOND,
        input_bytes=input_bytes(memory, facts),
        loss_bytes=sum(layer.kept for layer in memory.layers if layer.name == LOSS) * m if memory is not None else 0.0,
        loss_peak=found.loss_peak,
        outside_peak=outside_peak(memory, found.layers[-1]),
        other_bytes=other_bytes(memory, facts),
        optimizer_scale=(memory.optimizer or 0.0) if memory is not None else 0.0,
        gradients=gradients,
        minibatches=per_step,
        weight_share=found.weight_share,
        link=link,
        rates=split.rates,
        notes=found.notes if sizes is None else (*found.notes, f"{sizes}; plans are about these"),
        by_cuts=facts.cuts is not None,
    )
    predicted = (per_step * makespan + outside) * MICROSECOND, window.bubble(makespan)
    setting = _setting(facts, split.schedule, window.checkpoint)
    if setting is not None:
        plan = predict(costs, setting, found.balance)
        if split.schedule.split.any() and abs(plan.step_seconds / predicted[0] - 1) > DOUBTFUL:
            setting = None
        else:
            predicted = plan.step_seconds, plan.bubble
    begin, end = window.example()
    return Measured(
        costs=costs,
        facts=facts,
        schedule=split.schedule,
        checkpoint=window.checkpoint,
        balance=found.balance,
        setting=setting,
        layers_known=found.known,
        steps=len(np.unique(times.step)),
        step_seconds=float(np.median(times.period)) * MICROSECOND,
        window_seconds=float(np.median(own.end - own.begin)) * MICROSECOND,
        bubble=bubble,
        begin=begin * MICROSECOND,
        end=end * MICROSECOND,
        predicted_seconds=predicted[0],
        predicted_bubble=predicted[1],
        parameter_scale=parameter_scale(memory, facts, gradients),
        limit=limit_of(memory, facts, run.description),
        processors=steps.placements[facts.partitions].processors,
    )


def _usual(times: StepTimes, minibatches: MiniBatchTable) -> tuple[StepTimes, Column]:
    """Return the steps whose length is nearest to the median, and which of the mini-batches are theirs."""
    apart = np.abs(times.period - np.median(times.period))
    usual = times.where(apart <= np.sort(apart)[max(1, round(USUAL * len(apart))) - 1])
    return usual, np.flatnonzero(np.isin(minibatches.step, usual.step))[:ENOUGH]


def _setting(facts: DescribedPipeline, schedule: Schedule, checkpoint: str) -> Setting | None:
    """Return the setting that an order is, if it is one; GPipe's backwards may come in any order."""
    n, m, devices = schedule.stages, schedule.chunks, schedule.devices
    if n % devices or (devices == 1 and n > 1):
        return None
    same = []
    for name in SCHEDULES:
        with contextlib.suppress(ValueError):  # it needs other numbers
            setting = Setting(name, devices, m, checkpoint, n // devices)
            if _same(setting.build(), schedule):
                same.append(setting)
    if same:  # few micro-batches have the same order in several schedules
        return next((setting for setting in same if facts.schedule == setting.engine_name), same[0])
    first = all((row[:m, 0] == F).all() for row in schedule.order)
    return Setting("gpipe", n, m, checkpoint) if devices == n and first and facts.schedule == "gpipe" else None


def _same(named: Schedule, found: Schedule) -> bool:
    """Return whether orders are the same, but for stages of which nothing is recomputed."""
    again = found.order[found.order[..., 0] == R][:, 1]
    rows = [row[(row[:, 0] != R) | np.isin(row[:, 1], again)] for row in named.order]
    return len(rows) == len(found.order) and all(
        np.array_equal(row[row[:, 0] >= 0], other[other[:, 0] >= 0])
        for row, other in zip(rows, found.order, strict=True)
    )


def _between_devices(transfers: Transfers) -> tuple[float, float]:
    """Return how many microseconds transfers took in all, and one of them."""
    taken = float((transfers.end - transfers.begin).sum()) if len(transfers) else 0.0
    return taken, taken / max(len(transfers), 1)


def _between_ranks(messages: Messages) -> tuple[float, float]:
    """Return the same for messages between ranks, without the waits before a message was sent."""
    timed = messages.where(messages.waiting.astype(bool))
    return float(messages.wait.sum()), float(timed.time.mean()) if len(timed) else 0.0


def _link(microseconds: float, sizes: Sequence[float]) -> Link:
    """Return a link on which a message takes that long: by latency if messages are small, else by bandwidth."""
    mean = float(np.mean(sizes)) if len(sizes) else 0.0
    if microseconds <= 0:
        return Link()
    if mean < SMALL_MESSAGE:
        return Link(latency=microseconds * MICROSECOND)
    return Link(bandwidth=mean / (microseconds * MICROSECOND))
