"""Find the best cut of a model in one setting: of those that fit into memory, the one whose simulation ends first.

If there are few cuts, all are considered. Otherwise, cuts are built block by block, and those that cannot beat the best
one so far are dropped (branch and bound). `pipesight.schedule.lower_bounds` says what is worth simulating.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesight.schedule.balancing import balance_cost, check_partitions
from pipesight.schedule.lower_bounds import ChainBound, GPipeBound, bounds, is_chain
from pipesight.schedule.simulation import Times
from pipesight.schedule.stage_costs import Cuts, StageCosts

__all__ = ["FoundBalance", "find_balance"]

_FEW = 50_000
"""Up to this many cuts, all are considered."""
_PARTIAL = 400_000
"""After this many partial cuts, the search stops without a proof that none is better."""
_SAME = 1e-9
"""Relative differences below this are rounding."""
_CROWDED = 16
"""How many cuts are simulated if devices slow each other down: it takes longer, and cuts differ less."""
_TOGETHER = 2**22
"""How many tasks are simulated at once, over all cuts."""


@dataclass(frozen=True, slots=True)
class FoundBalance:
    """The best cut that was found."""

    balance: tuple[int, ...]
    seconds: float
    bound: float
    """No cut takes less; equal to ``seconds`` if the best is proven."""
    least_bytes: float
    """The least peak memory of any cut; larger than the limit if nothing fits."""

    @property
    def fits(self) -> bool:
        """Whether there is a cut that fits."""
        return bool(self.balance)


def find_balance(blocks: StageCosts, *, limit: float = math.inf) -> FoundBalance:
    """Return the fastest cut that needs at most ``limit`` bytes on any device; ``ValueError`` with too few layers."""
    check_partitions(blocks.layers, blocks.setting.stages)
    search = _Search(blocks, limit)
    # With several blocks per device there is no good bound for partial cuts, so more are considered.
    few = _FEW if blocks.setting.rounds == 1 else 10 * _FEW
    if math.comb(blocks.layers - 1, blocks.setting.stages - 1) <= few:
        cuts = _all_cuts(blocks.layers, blocks.setting.stages)
        return search.result(search.simulate_best(cuts, bounds(blocks, cuts)))
    if not (is_chain(blocks) or blocks.setting.schedule == "gpipe") or blocks.crowded:
        search.improve()
        return search.result(min(search.seconds, float(blocks.busy()[0, -1]) / blocks.setting.partitions))
    return _branch_and_bound(blocks, search, limit)


class _Search:
    """The best cut so far."""

    def __init__(self, blocks: StageCosts, limit: float) -> None:
        self._blocks, self._limit = blocks, limit
        self.seconds, self.cut = math.inf, np.empty(0, np.int64)
        self.least_bytes = math.inf

    def result(self, bound: float) -> FoundBalance:
        balance = tuple(int(count) for count in np.diff(self.cut))
        proven = bound >= self.seconds * (1 - _SAME)
        return FoundBalance(balance, self.seconds, self.seconds if proven else bound, self.least_bytes)

    def fitting(self, cuts: Cuts) -> NDArray[np.bool_]:
        """Return which of the cuts fit."""
        if math.isinf(self._limit):
            return np.ones(cuts.shape[1], bool)
        needs = self._blocks.memory(cuts).max(axis=0)
        self.least_bytes = min(self.least_bytes, float(needs.min(initial=math.inf)))
        return np.asarray(needs <= self._limit)

    def simulate_best(self, cuts: Cuts, least: Times) -> float:
        """Simulate cuts that may beat the best so far, most promising first, and of equals the most even.

        Return a bound for all of them: the best time, unless some that may be better were not simulated.
        """
        fits = self.fitting(cuts)
        cuts, least = cuts[:, fits], least[fits]
        if not len(least):
            return self.seconds
        unevenness = (np.diff(cuts, axis=0) ** 2).sum(axis=0)
        order = np.lexsort((unevenness, np.round(least / max(least.min(), 1e-300), 10)))
        most = max(16, _TOGETHER // self._blocks.schedule.tasks)
        done, size = 0, 16
        while done < len(order) and least[order[done]] < self.seconds * (1 - _SAME):
            if self._blocks.crowded and done >= _CROWDED:
                return float(least[order[done]])
            chosen = cuts[:, order[done : done + size]]
            done, size = done + size, min(4 * size, most)
            makespans = self._blocks.simulate(chosen).makespan
            best = int(np.argmin(np.round(makespans / max(makespans.min(), 1e-300), 10)))
            if makespans[best] < self.seconds * (1 - _SAME):
                self.seconds, self.cut = float(makespans[best]), chosen[:, best]
        return self.seconds

    def improve(self) -> None:
        """Improve the best cut, or an even one, by moving ends of neighbouring blocks as long as that helps."""
        layers, stages = self._blocks.layers, self._blocks.setting.stages
        cut = self.cut
        if not len(cut):
            busy = self._blocks.busy()
            alone = [float(busy[k, k + 1]) for k in range(layers)]
            cut = np.concatenate([[0], np.cumsum(balance_cost(alone, stages))])
        moves = _moves(stages)
        known: tuple[float, float] = (math.inf, math.inf)
        while True:
            cuts = np.concatenate([cut[:, None], cut[:, None] + moves], axis=1)
            cuts = cuts[:, (np.diff(cuts, axis=0) > 0).all(axis=0)]
            makespans = self._blocks.simulate(cuts).makespan
            excess = np.zeros_like(makespans)
            if not math.isinf(self._limit):
                needs = self._blocks.memory(cuts).max(axis=0)
                self.least_bytes = min(self.least_bytes, float(needs.min()))
                excess = np.maximum(needs - self._limit, 0.0)
            best = int(np.lexsort((makespans, excess))[0])
            found = (float(excess[best]), float(makespans[best]))
            if found[0] > known[0] or (found[0] == known[0] and found[1] >= known[1] * (1 - _SAME)):
                break
            known, cut = found, cuts[:, best]
        if known[0] == 0.0 and known[1] < self.seconds:
            self.seconds, self.cut = known[1], cut


def _branch_and_bound(blocks: StageCosts, search: _Search, limit: float) -> FoundBalance:
    """Build cuts block by block, best bound first; each device has one block."""
    n, layers = blocks.setting.partitions, blocks.layers
    allowed = np.zeros((n, layers + 1, layers + 1))
    if not math.isinf(limit):
        needs = blocks.memory_of_blocks()
        search.least_bytes = _least_of_blocks(needs)
        if search.least_bytes > limit:
            return search.result(math.inf)
        allowed[needs > limit] = math.inf
    search.improve()
    bound = (GPipeBound if blocks.setting.schedule == "gpipe" else ChainBound)(blocks, allowed)
    tie = itertools.count()
    start = (np.zeros((1, 1), np.int64), bound.start())
    queue: list[tuple[float, int, Cuts, Times, Times]] = [(bound.lowest, next(tie), *start, np.full(1, bound.lowest))]
    seen = 0
    while queue and seen < _PARTIAL:
        _, _, cuts, numbers, least = heapq.heappop(queue)
        open_ = least < search.seconds * (1 - _SAME)
        cuts, numbers = cuts[:, open_], numbers[:, open_]
        device = len(cuts) - 1
        # The last block ends with the model; before it, each device to come needs a layer.
        ends = np.arange(layers + 1) if device < n - 1 else np.array([layers])
        which, end = (index.ravel() for index in np.meshgrid(np.arange(cuts.shape[1]), ends, indexing="ij"))
        possible = (end > cuts[-1, which]) & (end <= layers - (n - 1 - device))
        which, end = which[possible], end[possible]
        seen += len(which)
        numbers, least = bound.extend(numbers[:, which], device, cuts[-1, which], end)
        open_ = least < search.seconds * (1 - _SAME)
        cuts = np.concatenate([cuts[:, which[open_]], end[None, open_]])
        numbers, least = numbers[:, open_], least[open_]
        if device == n - 1:
            search.simulate_best(cuts, np.maximum(least, bounds(blocks, cuts)))
            continue
        order = np.argsort(least, kind="stable")
        for part in np.array_split(order, -(-len(order) // 512)) if len(order) else ():
            # Among equals, a deeper one comes first, so that there is soon a complete cut to beat.
            key = float(least[part[0]]) * (1 - 1e-6 * device)
            heapq.heappush(queue, (key, next(tie), cuts[:, part], numbers[:, part], least[part]))
    if queue:
        search.improve()
    left = [float(least.min()) for _, _, _, _, least in queue]
    return search.result(min([search.seconds, *left]))


@functools.lru_cache(maxsize=8)
def _all_cuts(layers: int, stages: int) -> Cuts:
    inner = itertools.chain.from_iterable(itertools.combinations(range(1, layers), stages - 1))
    cuts = np.empty((math.comb(layers - 1, stages - 1), stages + 1), np.int64)
    cuts[:, 0], cuts[:, -1] = 0, layers
    if stages > 1:
        cuts[:, 1:-1] = np.fromiter(inner, np.int64).reshape(-1, stages - 1)
    return np.ascontiguousarray(cuts.T)


def _moves(stages: int) -> Cuts:
    """Return changes of a cut: neighbouring inner ends, moved by one or two layers."""
    moves = [
        [by if first <= k < last else 0 for k in range(stages + 1)]
        for first, last in itertools.combinations(range(1, stages + 1), 2)
        for by in (-2, -1, 1, 2)
    ]
    return np.array(moves, np.int64).reshape(-1, stages + 1).T


def _least_of_blocks(needs: Times) -> float:
    """Return the least peak memory of any cut."""
    size = needs.shape[1]
    best = np.full(size, math.inf)
    best[-1] = 0.0
    after = np.triu(np.ones((size, size), bool), 1)
    for device in reversed(range(len(needs))):
        best = np.where(after, np.maximum(needs[device], best), math.inf).min(axis=1)
    return float(best[0])
