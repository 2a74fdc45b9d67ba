"""The bubble of every mini-batch, and what each part of it comes from.

The recorded order of tasks is simulated again and again, each time closer to what happened::

    apart      every task of a phase takes the same time, every partition has its own device
    even       ... on the devices as they are
    usual      every partition takes what it usually does
    own times  every task takes its own time
    moved      ... and waits for its input as long as it did
    window     what was measured

The idle time that each line adds to the one above has a name: fill and drain (all of the first), sharing,
imbalance, jitter, transfers, host gaps. None is negative, and with the time in which a partition computes they add up
to the window, exactly: all are whole microseconds.

Partitions that share fewer processors than there are partitions slow each other down. The time that tasks lose this way
counts as sharing, too; `pipesight.schedule.contention` finds it.

A rank that has several partitions and computes for one at a time is a worker of its own: its time is split in the same
way, from the second line on. It is idle while none of them computes, and shares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.minibatch_arrays import Lengths, MiniBatchArrays, Times, orders_of
from pipesight.analysis.step_grouping import MiniBatchTable
from pipesight.analysis.transfer_waits import arrivals_of, of_rows, waits
from pipesight.runs.reading.event_tables import Column, Tasks, Transfers
from pipesight.schedule.contention import Concurrency, rate_of, rates_of
from pipesight.schedule.simulation import simulate
from pipesight.schedule.task_orders import Schedule

__all__ = ["LOSSES", "WindowSplit", "split_windows"]

LOSSES = ("fill_and_drain", "sharing", "imbalance", "jitter", "transfers", "host_gaps")
"""The losses of a partition inside its windows, in the order in which they are computed."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowSplit:
    """Where the time of mini-batches that have the same tasks went. Times are whole microseconds.

    ``busy[b, j] + losses[:, b, j].sum() == window[b]``, for every mini-batch b and partition j. Of what is busy,
    ``crowded`` is lost as well.
    """

    rows: Column
    """Which rows of the table of mini-batches these are."""
    schedule: Schedule | None
    """The most common order; ``None`` if no such order can run."""
    window: Times
    busy: Times
    losses: Times
    """By loss, mini-batch and partition."""
    worker_busy: Times
    """As ``busy``, by worker: a rank with several partitions that computes one task at a time, or else a partition."""
    worker_losses: Times
    """As ``losses``, by loss, mini-batch and worker."""
    crowded: Times
    """How much longer the tasks of each partition took because others computed on the same processors."""
    rates: tuple[float, ...]
    """How fast each of 1, 2, ... workers computes while that many do; empty if each has its own device."""
    phases: Times
    """The time computing, by phase, mini-batch and partition."""
    turnaround: Times
    """The host gap between the last forward and the first backward, if these do not overlap."""
    bound: Lengths
    """The bubble of the schedule alone, with tasks of equal length: (n - 1) / (m + n - 1) for GPipe."""
    durations: Lengths
    """The time of each task: by phase, partition, micro-batch and mini-batch; 0 where there is none."""

    def where(self, rows: Column) -> WindowSplit:
        """Return some of the mini-batches."""
        return WindowSplit(
            rows=self.rows[rows],
            schedule=self.schedule,
            window=self.window[rows],
            busy=self.busy[rows],
            losses=self.losses[:, rows],
            worker_busy=self.worker_busy[rows],
            worker_losses=self.worker_losses[:, rows],
            crowded=self.crowded[rows],
            rates=self.rates,
            phases=self.phases[:, rows],
            turnaround=self.turnaround[rows],
            bound=self.bound[rows],
            durations=self.durations[..., rows],
        )

    @property
    def bubble(self) -> Lengths:
        """The share of the window in which each partition is idle."""
        return 1 - self.busy / np.maximum(self.window, 1)[:, None]


def split_windows(
    minibatches: MiniBatchTable,
    tasks: Tasks,
    transfers: Transfers,
    *,
    devices: Callable[[int], Sequence[int]] = range,
    workers: Callable[[int], Sequence[int]] = range,
    processors: Callable[[int], int | None] = lambda partitions: None,
) -> list[WindowSplit]:
    """Split the windows of mini-batches that are complete; those with the same tasks are split together.

    ``devices`` and ``workers`` give those of the partitions, for a number of them. Partitions on one device take turns;
    the bubble of workers counts. ``processors`` gives how many the partitions of each mini-batch share on a CPU.
    """
    if not len(minibatches):
        return []
    arrivals = arrivals_of(minibatches, tasks, transfers)
    shape = np.stack([minibatches.partitions, minibatches.chunks, minibatches.count])
    shapes, which = np.unique(shape, axis=1, return_inverse=True)
    found = []
    for number, (n, m, count) in enumerate(shapes.T.tolist()):
        rows = np.flatnonzero(which.ravel() == number)
        place = minibatches.first[rows][:, None] + np.arange(count)
        homes = np.asarray(devices(n), np.int64)
        batch = MiniBatchArrays(tasks, place, minibatches.begin[rows], n, m, homes)
        for own in batch.by_tasks():
            moved = of_rows(arrivals, rows[own.rows], len(minibatches))
            found.append(_split(own, rows[own.rows], moved, np.asarray(workers(n), np.int64), processors(n)))
    return found


def _split(
    batch: MiniBatchArrays, rows: Column, arrivals: Transfers, workers: Column, processors: int | None
) -> WindowSplit:
    lengths = batch.end - batch.begin
    durations = batch.dense(lengths)
    window = batch.end.max(axis=1)
    busy = np.minimum(_busy(batch, np.arange(batch.n)), window[:, None])
    even, usual, even_busy, evenly, usual_busy = _usual(batch, durations)
    slowed, delays = waits(batch, arrivals, durations)

    # How long the window would be in each simulation. Orders that cannot be simulated are taken to wait for nothing.
    spans = np.empty((5, len(rows)))
    spans[:2], spans[2], spans[3:] = even_busy, usual_busy.max(axis=1), busy.max(axis=1)
    most_common: Schedule | None = None
    for number, (group, apart, together) in enumerate(orders_of(batch)):
        most_common = together if number == 0 else most_common
        if together is None or apart is None:
            continue
        spans[0, group] = simulate(apart, even[..., group]).makespan
        shared = (batch.homes != np.arange(batch.n)).any()
        spans[1, group] = simulate(together, even[..., group]).makespan if shared else spans[0, group]
        spans[2, group] = simulate(together, usual[..., group]).makespan
        spans[3, group] = simulate(together, durations[..., group]).makespan
        spans[4, group] = spans[3, group]
        if slowed is not None:
            spans[4, group] = simulate(together, slowed[..., group], delays=delays[..., group]).makespan

    losses = _losses(window, busy, spans, even_busy[:, None], usual_busy)
    bound = np.maximum(0, 1 - even_busy / np.maximum(spans[0], 1e-9))
    worker_busy, worker_losses = busy, losses
    if (workers != np.arange(batch.n)).any():
        worker_busy = np.minimum(_busy(batch, workers), window[:, None])
        evenly, usual_busy = (_sums(times, workers) for times in (evenly, usual_busy))
        spans[1] = np.maximum(spans[1], evenly.max(axis=1))  # what could not be simulated
        spans[2] = np.maximum(spans[2], usual_busy.max(axis=1))
        spans[0] = spans[1]
        worker_losses = _losses(window, worker_busy, spans, evenly, usual_busy)
        bound = np.maximum(0, 1 - evenly.mean(axis=1) / np.maximum(spans[0], 1e-9))
    rates, crowded = _crowded(batch, workers, processors)
    return WindowSplit(
        rows=rows,
        schedule=most_common,
        window=window,
        busy=busy,
        losses=losses,
        worker_busy=worker_busy,
        worker_losses=worker_losses,
        crowded=np.minimum(crowded, busy),
        rates=rates,
        turnaround=np.clip(batch.turnaround(), 0, worker_losses[-1].min(axis=1)),
        phases=durations.sum(axis=2).transpose(0, 2, 1).astype(np.int64),
        bound=bound,
        durations=durations,
    )


def _crowded(batch: MiniBatchArrays, workers: Column, processors: int | None) -> tuple[tuple[float, ...], Times]:
    """Return how much workers slow each other down, and what that costs each partition."""
    lost = np.zeros((len(batch.code), batch.n), np.int64)
    if processors is None:
        return (), lost
    rates = rates_of(batch.begin, batch.end, batch.code // batch.m, processors)
    if rate_of(rates, int(workers.max()) + 1) < 1:
        longer = batch.end - batch.begin - Concurrency(batch.begin, batch.end).work(rates)
        for j in range(batch.n):
            lost[:, j] = _whole(np.where(batch.code // batch.m % batch.n == j, longer, 0.0).sum(axis=1))
    return rates, lost


def _losses(window: Times, busy: Times, spans: Lengths, even_busy: Lengths, usual_busy: Lengths) -> Times:
    """Split the idle time of each window by cause; return it by loss, mini-batch and lane: a partition or a worker.

    ``spans`` are the lengths of the window in each simulation. ``even_busy`` is how long a lane would compute if tasks
    of a phase took the same time, ``usual_busy`` how long it usually does.
    """
    own = np.clip(_whole(spans[3]), busy.max(axis=1), window)
    moved = np.clip(_whole(spans[4]), own, window)
    # A lane's idle time goes to each cause in turn, up to the usual amount of that cause.
    rest = own[:, None] - busy
    parts = []
    fill, shared_span = _whole(spans[0][:, None] - even_busy), _whole(spans[1][:, None] - even_busy)
    uneven = _whole(spans[2][:, None] - usual_busy) - np.maximum(fill, shared_span)
    for part in (fill, shared_span - fill, uneven):
        parts.append(np.minimum(np.maximum(part, 0), rest))
        rest = rest - parts[-1]
    same = np.ones((1, busy.shape[1]), np.int64)
    return np.stack([*parts, rest, (moved - own)[:, None] * same, (window - moved)[:, None] * same])


def _sums(times: Lengths, workers: Column) -> Lengths:
    """Add up times of partitions, the last axis, by the worker of each."""
    sums: Lengths = times @ (workers[:, None] == np.arange(int(workers.max()) + 1))
    return sums


def _whole(times: Lengths) -> Times:
    return np.maximum(np.rint(times), 0).astype(np.int64)


def _usual(batch: MiniBatchArrays, durations: Lengths) -> tuple[Lengths, Lengths, Lengths, Lengths, Lengths]:
    """Return what tasks would take without jitter, all the same, and each partition as usual; and what that adds up to:
    all the same in the mean partition and in each, and as usual in each.

    Medians, so that a task that is late now and then is jitter, and not a slow partition. Mini-batches may be of
    different length, so a partition has a usual share of the time of a phase.
    """
    n, m = batch.n, batch.m
    present = np.zeros((4, n, m), bool)
    present.reshape(-1)[batch.code[0]] = True
    counts = present.sum(axis=2)  # of a phase in a partition
    level = np.zeros((4, durations.shape[-1]))
    ratio = np.zeros((4, n))
    for phase in np.flatnonzero(counts.any(axis=1)):
        js = np.flatnonzero(counts[phase])
        middles = np.stack([np.median(durations[phase, j][present[phase, j]], axis=0) for j in js])
        shares = middles / np.maximum(middles.mean(axis=0), 1e-9)
        share = np.median(shares, axis=1)
        ratio[phase, js] = share / max(share.mean(), 1e-9)
        scaled = durations[phase, js] / np.maximum(ratio[phase, js], 1e-9)[:, None, None]
        level[phase] = np.median(scaled[present[phase, js]], axis=0)
    even = np.broadcast_to(level[:, None, None], durations.shape)
    usual = np.broadcast_to((level[:, None] * ratio[:, :, None])[:, :, None], durations.shape)
    even_busy = counts.sum(axis=1) @ level / n
    evenly = np.einsum("pj,pb->bj", counts, level)
    usual_busy = np.einsum("pj,pb,pj->bj", counts, level, ratio)
    return even, usual, even_busy, evenly, usual_busy


def _busy(batch: MiniBatchArrays, lanes: Column) -> Times:
    """Return how long lanes compute. ``lanes`` gives the lane of each partition; tasks that overlap count once."""
    lane = lanes[batch.code // batch.m % batch.n]
    by_lane = np.argsort(lane, axis=1, kind="stable")
    columns = (lane, batch.begin, batch.end)
    lane, begin, end = (np.take_along_axis(column, by_lane, axis=1) for column in columns)
    # One running maximum for all lanes: they are moved apart in time.
    apart = lane * (int(end.max(initial=0)) + 1)
    reached = np.maximum.accumulate(end + apart, axis=1)
    before = np.zeros_like(reached)
    before[:, 1:] = reached[:, :-1]
    own = reached - np.maximum(begin + apart, before)
    busy = np.zeros((len(begin), int(lanes.max()) + 1), np.int64)
    for number in range(busy.shape[1]):
        busy[:, number] = np.where(lane == number, own, 0).sum(axis=1)
    return busy
