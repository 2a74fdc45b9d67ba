"""How much faster the job would be without stragglers, and what makes it slower: its recording, replayed.

Each scenario is a replay in which some operations keep their durations, and the others have ideal ones: the mean of
their kind for computing, the median of their kind for transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipesight._formatting import rough_percent
from pipesight._plurals import count_of
from pipesight.analysis.microbatch_order import rearranged
from pipesight.analysis.operation_graph import OperationGraph, graph_of, widest_groups
from pipesight.analysis.replay import Scenarios, replay, transfers
from pipesight.analysis.slow_causes import SLOWEST, Cause, Fixes, verdict_of
from pipesight.analysis.usual_durations import usual_durations
from pipesight.runs.reading.event_tables import Column, Operations
from pipesight.runs.reading.operation_kinds import KINDS

__all__ = ["Layout", "Replays", "WhatIf", "what_if"]

ROWS = 100_000
"""Operations whose graph is made at once, if no step has more."""
VISIBLE = 1.01
"""The slowdown from which a worker can be called a straggler."""
DOUBTFUL = 0.05
"""The error of the replayed step from which the report says so."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank is the worker of each data-parallel rank and stage."""

    dp_ranks: tuple[int, ...]
    """The data-parallel ranks, a row of ``ranks`` each."""
    stages: tuple[int, ...]
    """The stages, a column of ``ranks`` each."""
    ranks: tuple[tuple[int | None, ...], ...]
    """A row per data-parallel rank, a column per stage; ``None`` where no operation was recorded."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What replays say. Times are microseconds; a slowdown is how many times as long a step takes as an ideal one."""

    steps: int
    """How many steps were replayed."""
    operations: int
    """How many operations these have."""
    recorded: float
    """The mean step as recorded."""
    replayed: float
    """The same, replayed with the durations that were recorded."""
    ideal: float
    """The same, with ideal ones."""
    error: float
    """How far the recorded step is from the replayed one, as a share of that; launching is what mostly lies between."""
    slowdown: float
    """S: replayed by ideal."""
    m_w: float | None
    """The share of the slowdown that goes away if the slowest 3% of workers are ideal; ``None`` without a slowdown."""
    m_s: float | None
    """The same for the last stage."""
    by_operation: dict[str, float]
    """The slowdown if only operations of this kind are as recorded."""
    by_dp_rank: dict[int, float]
    """The same for the operations of each data-parallel rank."""
    by_stage: dict[int, float]
    """The same for those of each stage."""
    by_worker: dict[str, float]
    """The smaller one of its data-parallel rank and its stage; by rank or, where workers are partitions, by rank and
    partition, such as ``0:2``."""
    layout: Layout
    """Which rank is the worker of each data-parallel rank and stage."""
    correlation: float | None
    """Of forwards and backwards of the same micro-batches; near 1 where sequences differ."""
    reordered: float | None
    """The mean step if the longest micro-batches of each batch came in the middle; ``None`` if they do not differ."""
    exchanged: float | None
    """The same if replicas exchanged micro-batches, too, to have the same work; ``None`` if they cannot."""
    causes: tuple[Cause, ...]
    """What slows the job, the largest first; each is what removing it saves once those before it are removed."""
    verdict: str
    """The same in words."""
    remarks: tuple[str, ...]
    """What is in doubt."""

    @property
    def is_certain(self) -> bool:
        """Whether the slowdown is more than what replays are off by; shares of a smaller one say nothing."""
        return self.slowdown - 1 > abs(self.error)

    @property
    def trusted(self) -> bool:
        """Whether the replayed step is about as long as the recorded one."""
        return abs(self.error) <= DOUBTFUL

    def slows(self, rank: int, partition: int) -> bool:
        """Return whether the worker of a partition slows the job visibly."""
        return self.by_worker.get(str(rank), self.by_worker.get(f"{rank}:{partition}", 1.0)) >= VISIBLE

    def slowdown_of(self, row: int, column: int) -> float:
        """Return the slowdown of a worker, by its place in the layout."""
        return min(self.by_dp_rank[self.layout.dp_ranks[row]], self.by_stage[self.layout.stages[column]])


class Replays:
    """The graphs of all steps, a few steps at a time, to be replayed with any durations."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        widest = widest_groups(operations)
        self._pieces: list[tuple[slice, OperationGraph]] = []
        self.durations = np.empty(len(operations))
        """As recorded; of communications, the transfer alone."""
        for rows in _whole_steps(operations.step, ROWS):
            own = operations.where(rows)
            graph = graph_of(own, widest)
            self._pieces.append((rows, graph))
            self.durations[rows] = transfers(graph, own.begin, own.duration)
        self.alone = sum(graph.alone for _, graph in self._pieces)

    def run(self, scenarios: Scenarios) -> Column:
        """Return the mean step of each scenario."""
        found = [replay(graph, scenarios.of_rows(rows)) for rows, graph in self._pieces]
        mean: Column = np.concatenate(found).mean(axis=0)
        return mean

    def run_whole(self, *durations: Column) -> Column:
        """Return the mean step with some durations of all operations."""
        return self.run(Scenarios(self.durations, self.durations, durations, count=len(durations)))


def what_if(
    operations: Operations,
    partitions: Mapping[int, tuple[int, int]] | None = None,
    *,
    recorded: float | None = None,
    chunks: int | None = None,
) -> WhatIf:
    """Replay a job in all scenarios.

    ``operations`` are sorted by step, replica, stage and begin. ``partitions`` has rank and partition of each worker,
    where workers are partitions and ``rank`` numbers them. ``recorded`` is the mean step; by default, steps last from
    their first begin to their last end. ``chunks`` is the number of micro-batches of a batch, where a step may have
    several.

    Raises:
        ValueError: The operations contradict each other, so they cannot be replayed.
    """
    replicas, own_replica = np.unique(operations.replica, return_inverse=True)
    stages, own_stage = np.unique(operations.stage, return_inverse=True)
    kinds, own_kind = np.unique(operations.kind, return_inverse=True)
    whole = 3
    first_replica = whole + len(kinds)
    first_stage = first_replica + len(replicas)
    count = first_stage + len(stages)
    replays = Replays(operations)
    durations, ideal = replays.durations, _ideal(operations, replays.durations)
    times = replays.run(
        Scenarios(
            durations,
            ideal,
            [durations, ideal, np.where(operations.stage == stages[-1], ideal, durations)],
            [
                (own_kind + whole).astype(np.int32),
                (own_replica + first_replica).astype(np.int32),
                (own_stage + first_stage).astype(np.int32),
            ],
            count,
        )
    )
    now, best, without_last = times[:whole].tolist()
    if min(now, best) <= 0:
        raise ValueError("a step takes no time in the replay, since no operation in it does")
    slowdowns = times / max(best, 1e-9)
    by_replica, by_stage = slowdowns[first_replica:first_stage], slowdowns[first_stage:]
    layout = _layout(operations, replicas, stages)
    of_worker = np.minimum(by_replica[:, None], by_stage[None, :])
    there = np.array([[rank is not None for rank in row] for row in layout.ranks])
    slow = _slowest(np.where(there, of_worker, -np.inf), int(there.sum()))
    without_slow = float(replays.run_whole(np.where(slow[own_replica, own_stage], ideal, durations))[0])
    excess = now - best
    recorded = float(_recorded_steps(operations).mean()) if recorded is None else recorded
    error = recorded / max(now, 1e-9) - 1
    workers = {
        worker: float(of_worker[d, s])
        for d, row in enumerate(layout.ranks)
        for s, worker in enumerate(row)
        if worker is not None
    }
    usual = usual_durations(operations, durations)
    causes = Fixes(operations, durations, ideal, usual).greedy(replays.run_whole, now=now, ideal=best)
    reordered = exchanged = None
    if any(cause.kind == "microbatches" for cause in causes):
        reordered, exchanged = (
            None if other is None else float(replays.run_whole(other)[0])
            for other in (
                rearranged(operations, durations, usual.even_microbatches, chunks=chunks, exchange=exchange)
                for exchange in (False, True)
            )
        )
    remarks = tuple(_remarks(error, replays.alone))
    return WhatIf(
        steps=len(np.unique(operations.step)),
        operations=len(operations),
        recorded=recorded,
        replayed=now,
        ideal=best,
        error=error,
        slowdown=now / max(best, 1e-9),
        m_w=(now - without_slow) / excess if abs(excess) > 1e-6 * best else None,
        m_s=(now - without_last) / excess if abs(excess) > 1e-6 * best else None,
        by_operation={KINDS[kind].name: float(slowdowns[whole + n]) for n, kind in enumerate(kinds.tolist())},
        by_dp_rank=dict(zip(replicas.tolist(), by_replica.tolist(), strict=True)),
        by_stage=dict(zip(stages.tolist(), by_stage.tolist(), strict=True)),
        by_worker={_name(worker, partitions): slowdown for worker, slowdown in workers.items()},
        layout=layout if partitions is None else _with_ranks(layout, partitions),
        correlation=usual.correlation,
        reordered=reordered,
        exchanged=exchanged,
        causes=causes if partitions is None else tuple(_with_partitions(cause, partitions) for cause in causes),
        verdict=verdict_of(causes, workers, now / max(best, 1e-9), stages=stages.tolist(), partitions=partitions),
        remarks=remarks,
    )


def _ideal(operations: Operations, durations: Column) -> Column:
    """Return ideal durations: the mean of their kind for computing, the median of their kind for transfers."""
    ideal = np.empty(len(durations))
    for number, kind in enumerate(KINDS):
        own = operations.kind == number
        if own.any():
            ideal[own] = np.median(durations[own]) if kind.is_communication else durations[own].mean()
    return ideal


def _recorded_steps(operations: Operations) -> Column:
    """Return how long each step took: from its first begin to its last end."""
    firsts = np.flatnonzero(np.concatenate([[True], operations.step[1:] != operations.step[:-1]]))
    ends = np.maximum.reduceat(operations.begin + operations.duration, firsts)
    found: Column = ends - np.minimum.reduceat(operations.begin, firsts)
    return found


def _whole_steps(step: Column, most: int) -> Iterator[slice]:
    """Divide rows into pieces of whole steps, of at most so many rows where a step is not longer."""
    begin = end = 0
    for after in [*(np.flatnonzero(step[1:] != step[:-1]) + 1).tolist(), len(step)]:
        if after - begin > most and end > begin:
            yield slice(begin, end)
            begin = end
        end = after
    yield slice(begin, end)


def _layout(operations: Operations, replicas: Column, stages: Column) -> Layout:
    code = operations.replica.astype(np.int64) * (int(stages[-1]) + 1) + operations.stage
    there, at = np.unique(code, return_index=True)
    ranks: list[list[int | None]] = [[None] * len(stages) for _ in replicas]
    for value, rank in zip(there.tolist(), operations.rank[at].tolist(), strict=True):
        replica, stage = divmod(value, int(stages[-1]) + 1)
        ranks[int(np.searchsorted(replicas, replica))][int(np.searchsorted(stages, stage))] = rank
    return Layout(tuple(replicas.tolist()), tuple(stages.tolist()), tuple(tuple(row) for row in ranks))


def _name(worker: int, partitions: Mapping[int, tuple[int, int]] | None) -> str:
    return str(worker) if partitions is None else ":".join(map(str, partitions[worker]))


def _with_ranks(layout: Layout, partitions: Mapping[int, tuple[int, int]]) -> Layout:
    rows = (tuple(None if worker is None else partitions[worker][0] for worker in row) for row in layout.ranks)
    return replace(layout, ranks=tuple(rows))


def _with_partitions(cause: Cause, partitions: Mapping[int, tuple[int, int]]) -> Cause:
    own = [partitions[worker] for worker in cause.ranks]
    return replace(cause, ranks=tuple(rank for rank, _ in own), partitions=tuple(part for _, part in own))


def _slowest(slowdowns: Column, workers: int) -> Column:
    """Return which workers are the slowest 3%, at least one."""
    count = max(1, round(SLOWEST * workers))
    slow = np.zeros(slowdowns.shape, bool)
    slow.ravel()[np.argsort(-slowdowns, axis=None, kind="stable")[:count]] = True
    return slow


def _remarks(error: float, alone: int) -> Sequence[str]:
    found = []
    if abs(error) > DOUBTFUL:
        found.append(
            f"the recorded step is {rough_percent(abs(error))} {'longer' if error > 0 else 'shorter'} than the "
            "replayed one, so what replays say may be wrong by as much"
        )
    if alone:
        found.append(f"{count_of(alone, 'message')} without the other end in the trace: replayed as recorded")
    return found
