"""The timelines of steps: lanes, blocks, layers in them, transfers, and what the program did beside the pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from pipesight.analysis.critical_path import PATH_PARTS, CriticalPath
from pipesight.analysis.curves import Moment
from pipesight.analysis.lane_bubbles import lane_bubbles, lanes_of
from pipesight.analysis.program_time import nest, own_name, part_title
from pipesight.analysis.step_grouping import EVALUATION, MiniBatchTable, StepTable, find_steps, replicas_of
from pipesight.runs.reading.event_tables import Column, LayerRuns, ProgramSpans, Spans, Tasks, Transfers
from pipesight.view.payload.size_limits import Limits
from pipesight.view.payload.span_rows import KIND_NAMES, Names, moments_between
from pipesight.view.payload.step_choice import choose_steps

__all__ = ["StepTimelines"]


class StepTimelines:
    """The steps of a run, ready to be drawn.

    Args:
        minibatches: All of them.
        tasks: The table that they were found in.
        spans: What the main threads did.
        transfers: Of the same run.
        limits: How much there is room for.
        replicas: That of each rank, if it is known.
        typical: The number of a step like most, if one was chosen.
        first: The number of the step to begin with; by default, the typical one.
        also: The number of another one that is wanted.
        only: The steps to show; by default, all.
        taking_turns: Ranks that compute for one of their partitions at a time.
        own: The spans that the user recorded.
        moments: The instants that the user recorded.

    Attributes:
        lanes: Those that there is room for, by rank and partition.
        numbers: The number of every step.
        times: How long each took, from its first forward to the next step's.
        chosen: The numbers of those to show, most important first.
        names: Those of the user's spans.
    """

    def __init__(
        self,
        minibatches: MiniBatchTable,
        tasks: Tasks,
        spans: Spans,
        transfers: Transfers,
        *,
        limits: Limits,
        replicas: Mapping[int, int] | None = None,
        typical: int | None = None,
        first: int | None = None,
        also: int | None = None,
        only: range | None = None,
        taking_turns: Collection[int] = (),
        own: ProgramSpans | None = None,
        moments: Sequence[Moment] = (),
    ) -> None:
        self._limits, self._taking_turns = limits, taking_turns
        self._user_spans, self._moments = _nested(ProgramSpans.empty() if own is None else own), moments
        self.names = Names()
        self._minibatches, self._tasks = minibatches, tasks
        self._spans, self._transfers = spans, transfers
        replicas = replicas_of(tasks, replicas)
        self._steps, self._own = find_steps(self._minibatches, spans, replicas)
        self.all_lanes = lanes_of(tasks, replicas)
        self.lanes = self.all_lanes[: limits.lanes]
        self._place = {(lane.rank, lane.partition): k for k, lane in enumerate(self.lanes)}
        self.numbers, self._rows = _by_number(self._steps, only)
        self._begin = np.array([self._steps.begin[rows].min() for rows in self._rows], np.int64)
        self._end = np.array([self._steps.end[rows].max() for rows in self._rows], np.int64)
        self.times = self._end - self._begin
        sizes = [int(self._own.count[self._steps.where(rows).members()].sum()) for rows in self._rows]
        places = [self.numbers.index(number) if number in self.numbers else None for number in (typical, first, also)]
        wanted = dict(zip(("typical", "first", "also"), places, strict=True))
        chosen = choose_steps(self.times, sizes, most=limits.blocks, **wanted)
        self.chosen = [self.numbers[k] for k in chosen]
        self.start = self.chosen[0] if self.chosen else None

    @property
    def levels(self) -> dict[str, int]:
        """How many rows the spans of each rank need: one, and as many as the user's are nested deep."""
        deepest = {rank: int(depth.max(initial=-1)) for rank, (_, depth) in self._user_spans.items()}
        return {str(rank): 2 + deepest.get(rank, -1) for rank in self.programs()}

    @property
    def chunks(self) -> int:
        """How many micro-batches a mini-batch has at most."""
        return int(self._tasks.microbatch.max(initial=0)) + 1

    def begins(self) -> dict[int, int]:
        """Return when the steps that are shown began."""
        return {number: int(self._begin[self.numbers.index(number)]) for number in self.chosen}

    @property
    def begin(self) -> int:
        """When the first task began."""
        return int(self._tasks.begin.min()) if len(self._tasks) else 0

    def step(self, number: int) -> dict[str, Any]:
        """Return what the page draws of a step, but for its layers; see `layers`."""
        k = self.numbers.index(number)
        begin, end = int(self._begin[k]), int(self._end[k])
        rows = self._minibatch_rows(k)
        tasks = self._tasks.where(rows.task_rows())
        bubbles = lane_bubbles(rows, self._tasks, self.lanes, taking_turns=self._taking_turns)
        return {
            "number": number,
            "end": end - begin,
            "windows": [
                [int(rows.replica[r]), int(rows.begin[r]) - begin, int(rows.end[r]) - begin]
                for r in np.argsort(rows.begin, kind="stable")
            ],
            "lane_bubbles": [None if bubble is None else round(bubble, 6) for bubble in bubbles],
            "tasks": self._columns(tasks, begin),
            "transfers": self._arrivals(number, begin),
            "spans": self._program(begin, end),
            "moments": moments_between(self._moments, begin, end),
        }

    def path(self, path: CriticalPath) -> dict[str, Any]:
        """Return a critical path: its parts, lane by lane where there is one, and the totals by kind."""
        begin = path.begin - int(self._begin[self.numbers.index(path.step)])
        first = {lane.rank: k for k, lane in reversed([*enumerate(self.lanes)])}
        parts = path.parts
        edges = [round(begin + part.begin) for part in parts] + [round(begin + part.end) for part in parts[-1:]]
        return {
            "lane": [self._place.get((part.rank, part.partition), first.get(part.rank, -1)) for part in parts],
            "kind": [PATH_PARTS.index(part.kind) for part in parts],
            "begin": edges[0],
            "time": np.diff(edges).tolist(),  # each begins where the one before ends
            "totals": [[kind, round(time)] for kind, time in path.totals().items()],
        }

    def layers(self, number: int, runs: LayerRuns, numbers: Mapping[tuple[int, str], int]) -> dict[str, list[int]]:
        """Return the runs of layers in the blocks of a step, block after block, as `step` has them.

        ``numbers`` has that of each layer, by partition and name.
        """
        tasks = self._sorted(self._tasks.where(self._minibatch_rows(self.numbers.index(number)).task_rows()))
        keys = {key: block for block, key in enumerate(_keys(tasks))}
        layer = list(zip(runs.partition.tolist(), runs.layer.tolist(), strict=True))
        known = zip(_keys(runs), layer, strict=True)
        block = np.array([keys.get(key, -1) if own in numbers else -1 for key, own in known], np.int64)
        runs, block = runs.where(block >= 0), block[block >= 0]
        order = np.lexsort((runs.begin, block))
        runs, block = runs.where(order), block[order]
        return {
            "count": np.bincount(block, minlength=len(tasks)).tolist(),
            "layer": [numbers[key] for key in zip(runs.partition.tolist(), runs.layer.tolist(), strict=True)],
            "begin": (runs.begin - tasks.begin[block]).tolist(),
            "time": (runs.end - runs.begin).tolist(),
        }

    def programs(self) -> list[int]:
        """Return the ranks whose main threads did something beside their pipelines."""
        there = {*self._spans.rank.tolist(), *self._user_spans, *(moment.rank for moment in self._moments)}
        return sorted(there & {lane.rank for lane in self.lanes})

    # Rows of a step.

    def _minibatch_rows(self, k: int) -> MiniBatchTable:
        """Return the mini-batches of a step, and evaluations that ran meanwhile."""
        own = self._own.where(self._steps.where(self._rows[k]).members())
        if (self._own.kind == EVALUATION).any():  # there is nothing else
            return own
        apart = self._minibatches.where(self._minibatches.kind == EVALUATION)
        meanwhile = (apart.begin >= self._begin[k]) & (apart.end <= self._end[k])
        return MiniBatchTable.joined(own, apart.where(meanwhile))

    def _sorted(self, tasks: Tasks) -> Tasks:
        """Return the tasks of lanes that are shown, by begin; the earliest, where there are too many."""
        pairs = zip(tasks.rank.tolist(), tasks.partition.tolist(), strict=True)
        shown = tasks.where(np.array([pair in self._place for pair in pairs], bool))
        order = np.lexsort((shown.partition, shown.rank, shown.begin))
        return shown.where(order[: max(self._limits.blocks, 1)])

    # Columns.

    def _columns(self, tasks: Tasks, begin: int) -> dict[str, list[int]]:
        tasks = self._sorted(tasks)
        return {
            "lane": self._lanes_of(tasks),
            "microbatch": tasks.microbatch.tolist(),
            "phase": tasks.phase.tolist(),
            "begin": np.diff(tasks.begin, prepend=begin).tolist(),  # differences are shorter
            "time": (tasks.end - tasks.begin).tolist(),
        }

    def _lanes_of(self, table: Tasks | Transfers) -> list[int]:
        pairs = zip(table.rank.tolist(), table.partition.tolist(), strict=True)
        return [self._place[rank, partition] for rank, partition in pairs]

    def _arrivals(self, number: int, begin: int) -> dict[str, list[int]]:
        own = self._transfers.where(self._transfers.step == number)
        pairs = zip(own.rank.tolist(), own.partition.tolist(), strict=True)
        own = own.where(np.array([pair in self._place for pair in pairs], bool))
        own = own.where(np.arange(min(len(own), self._limits.blocks)))
        return {
            "lane": self._lanes_of(own),
            "begin": (own.begin - begin).tolist(),
            "time": (own.end - own.begin).tolist(),
        }

    def _program(self, begin: int, end: int) -> dict[str, list[int]]:
        ranks = np.array(self.programs(), np.int64)
        shown = (self._spans.begin < end) & (self._spans.end > begin) & np.isin(self._spans.rank, ranks)
        own = self._spans.where(shown)
        own = own.where(np.argsort(own.begin - own.end, kind="stable")[: self._limits.blocks // 10])
        own = own.where(np.argsort(own.begin, kind="stable"))
        columns = {
            "rank": own.rank.tolist(),
            "kind": own.kind.tolist(),
            "begin": (own.begin - begin).tolist(),
            "time": (own.end - own.begin).tolist(),
            "name": [self.names.place(part_title(KIND_NAMES[kind])) for kind in own.kind.tolist()],
            "level": [0] * len(own),
        }
        for rank, (spans, depth) in self._user_spans.items():
            rows = np.flatnonzero((spans.begin < end) & (spans.end > begin))[: self._limits.blocks // 10]
            columns["rank"] += [rank] * len(rows)
            columns["kind"] += [KIND_NAMES.index("own")] * len(rows)
            columns["begin"] += (spans.begin[rows] - begin).tolist()
            columns["time"] += (spans.end[rows] - spans.begin[rows]).tolist()
            columns["name"] += [self.names.place(own_name(str(name))) for name in spans.name[rows]]
            columns["level"] += (depth[rows] + 1).tolist()
        return columns


def _nested(own: ProgramSpans) -> dict[int, tuple[ProgramSpans, Column]]:
    """Return the spans of each rank, and how many others are around each."""
    found = {}
    for rank in np.unique(own.rank).tolist():
        mine = own.where(own.rank == rank)
        _, _, depth = nest(mine.begin, mine.end)
        found[rank] = (mine, depth)
    return found


def _by_number(steps: StepTable, only: range | None) -> tuple[list[int], list[Column]]:
    """Return the numbers of steps, all or some, and for each the rows of its replicas."""
    numbers, which = np.unique(steps.step, return_inverse=True)
    order = np.argsort(which, kind="stable")
    edges = np.searchsorted(which[order], np.arange(1, len(numbers)))
    rows = np.split(order, edges) if len(numbers) else []
    kept = [(int(n), own) for n, own in zip(numbers, rows, strict=True) if only is None or int(n) in only]
    return [number for number, _ in kept], [own for _, own in kept]


def _keys(table: Tasks | LayerRuns) -> list[tuple[int, ...]]:
    columns = (table.rank, table.minibatch, table.partition, table.microbatch, table.phase)
    return list(zip(*(column.tolist() for column in columns), strict=True))
