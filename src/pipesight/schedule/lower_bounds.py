"""A lower bound for the time of a cut, without simulating it; exact for `pipesight.GPipe`.

All micro-batches take equally long in a stage. So the slowest stage sets the pace::

    gpipe     all stages once, both ways + (m - 1) x (slowest forward + slowest recomputation and backward)
    others    until a device's first task + how long it is held + from its last backward to that of the first stage

In GPipe the two slowest may be different stages, since it runs all forwards before any backward. In the others, a
device is held by what it computes and, in 1F1B and zero-bubble, also by its first micro-batch, or its last, on its way
through later stages.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from pipesight.schedule.simulation import Times
from pipesight.schedule.stage_costs import Cuts, StageCosts
from pipesight.schedule.task_orders import B, F, R, W

__all__ = ["ChainBound", "GPipeBound", "bounds", "is_chain"]

_Hold: TypeAlias = tuple[Times, Times]
"""How long each block holds each device, and by how much a block delays the next device."""


def bounds(blocks: StageCosts, cuts: Cuts) -> Times:
    """Return a lower bound for each cut, in seconds."""
    begin, end = cuts[:-1], cuts[1:]
    if blocks.setting.schedule == "gpipe":
        return _gpipe(blocks, blocks.time[:, begin, end], blocks.send[end])
    if is_chain(blocks):
        device = np.arange(blocks.setting.partitions)[:, None]
        chains = [(held[device, begin, end] + _before(later[begin, end])).max(axis=0) for held, later in _holds(blocks)]
        return np.asarray(np.maximum.reduce(chains))
    return _of_busy(blocks, begin, end)


def is_chain(blocks: StageCosts) -> bool:
    """Return whether each device has one block, and runs backwards as soon as it can."""
    return blocks.setting.rounds == 1 and blocks.setting.schedule in ("1f1b", "zero-bubble")


def _of_busy(blocks: StageCosts, begin: Cuts, end: Cuts) -> Times:
    """Return the bounds that hold in any schedule that runs forwards before backwards.

    A device begins with a forward of its first stage, and ends with a backward of that stage, or with weight gradients.
    """
    n, homes = blocks.setting.partitions, np.asarray(blocks.schedule.device_of_stage)
    busy, weights = np.zeros((2, n, begin.shape[1]))
    np.add.at(busy, homes, blocks.busy()[begin, end])
    np.add.at(weights, homes, blocks.split.sum(axis=1)[:, None] * blocks.time[W][begin, end])
    there = _before((blocks.time[F] + blocks.send)[begin, end])[:n]
    back = np.minimum(blocks.time[B], blocks.whole) if blocks.split.any() else blocks.whole
    again = _before((back + blocks.send)[begin, end])[:n]
    return np.asarray((there + busy + np.maximum(again - weights, 0.0)).max(axis=0))


def _holds(blocks: StageCosts) -> list[_Hold]:
    """Return the bounds of schedules with one block per device that run backwards as soon as they can."""
    n, m, time = blocks.setting.partitions, blocks.setting.chunks, blocks.time
    forward, recompute, backward, weights = time
    later = forward + backward + 2 * blocks.send
    busy = np.repeat(blocks.busy()[None], n, axis=0)
    busy[-1] += blocks.again * np.maximum(blocks.loss - recompute, 0.0) + (m - blocks.again) * blocks.loss
    first, last = np.empty_like(busy), np.empty_like(busy)
    for device in range(n):
        # A micro-batch on its way through all that comes after the block and back, each stage a task's overhead more.
        more = (n - 1 - device) * (blocks.beside[F] + blocks.beside[B])
        way = (forward + backward)[:, -1] - (forward + backward)[-1, -1] + more + 2 * blocks.send + blocks.loss
        ahead = min(m, n - device)
        first[device] = way + forward * (1 + m - ahead) + m * backward + max(blocks.again - 1, 0) * recompute
        last[device] = way + forward * m + (1 + m - ahead) * backward + min(blocks.again, m - ahead) * recompute
    if blocks.setting.schedule != "zero-bubble":
        return [(busy, later), (first, later), (last, later)]
    # Weight gradients may be computed while earlier stages continue with backwards.
    return [(busy, forward + blocks.send), (busy - m * weights, later), (first, later), (last, later)]


def _gpipe(blocks: StageCosts, time: Times, out: Times) -> Times:
    m = blocks.setting.chunks
    there = time[F].sum(axis=0) + out.sum(axis=0) + (m - 1) * time[F].max(axis=0) + blocks.loss
    again = time[R] if blocks.again else 0.0
    back = np.cumsum(time[B] + out, axis=0) - out + (m - 1) * np.maximum.accumulate(again + time[B], axis=0)
    if blocks.again < m:
        return np.asarray(there + back[-1])
    if not blocks.schedule.joined:  # all stages but the last may recompute while others run forwards
        return np.asarray(there + time[R, -1] + back[-1])
    # Any stage may be the one that recomputes longest before its first backward.
    return np.asarray(there + (time[R] + back).max(axis=0))


def _before(times: Times) -> Times:
    """Return the sums over all stages before each."""
    return np.concatenate([np.zeros_like(times[:1]), np.cumsum(times, axis=0)[:-1]])


class ChainBound:
    """Bounds for cuts of which only the first blocks are known; each device has one block.

    The best that the other blocks can do is known from dynamic programming, from the last layer to the first.
    """

    def __init__(self, blocks: StageCosts, allowed: Times) -> None:
        self._allowed, self._holds = allowed, _holds(blocks)
        self._rests = [_minimax(held + allowed, later) for held, later in self._holds]
        self.lowest = max(float(rest[len(allowed), 0]) for rest in self._rests)

    def start(self) -> Times:
        """Return the numbers of a cut of which no block is known, one column each."""
        return np.zeros((2 * len(self._holds), 1))

    def extend(self, numbers: Times, device: int, begin: Cuts, end: Cuts) -> tuple[Times, Times]:
        """Add a block to each of some cuts; return their numbers, and how long all of it takes at least."""
        left = len(self._allowed) - device - 1
        found, least = np.empty_like(numbers), np.zeros(numbers.shape[1])
        for k, ((held, later), rest) in enumerate(zip(self._holds, self._rests, strict=True)):
            longest, before = numbers[2 * k], numbers[2 * k + 1]
            found[2 * k] = np.maximum(longest, before + held[device, begin, end])
            found[2 * k + 1] = before + later[begin, end]
            least = np.maximum(least, np.maximum(found[2 * k], found[2 * k + 1] + rest[left, end]))
        return found, least + self._allowed[device, begin, end]


class GPipeBound:
    """The same for GPipe, where forwards and backwards have a slowest stage each."""

    def __init__(self, blocks: StageCosts, allowed: Times) -> None:
        time, self._m = blocks.time, blocks.setting.chunks
        self._forward = time[F]
        self._backward = time[B] + time[R] if blocks.again else time[B]
        self._once = time[F] + time[B] + 2 * blocks.send
        self._last = time[R] if blocks.again == self._m else np.zeros_like(time[R])
        self._allowed, self._layers, self._loss = allowed, blocks.layers, blocks.loss
        self._rests = [
            _minimax(np.broadcast_to(times, allowed.shape) + allowed, np.zeros_like(times))
            for times in (self._forward, self._backward)
        ]
        # What all layers take once is the same for every cut, but for what each task and each transfer takes.
        self._remaining = _shortest(np.broadcast_to(self._once, allowed.shape) + allowed)
        n = len(allowed)
        paces = [float(rest[n, 0]) for rest in self._rests]
        self.lowest = self._loss + (self._m - 1) * sum(paces) + float(self._remaining[n, 0])

    def start(self) -> Times:
        """Return the numbers of a cut of which no block is known."""
        return np.zeros((3, 1))

    def extend(self, numbers: Times, device: int, begin: Cuts, end: Cuts) -> tuple[Times, Times]:
        """Add a block to each of some cuts; return their numbers, and how long all of it takes at least."""
        left = len(self._allowed) - device - 1
        found = np.stack(
            [
                np.maximum(numbers[0], self._forward[begin, end]),
                np.maximum(numbers[1], self._backward[begin, end]),
                numbers[2] + self._once[begin, end],
            ]
        )
        paces = [np.maximum(found[k], self._rests[k][left, end]) for k in range(2)]
        least = self._loss + (self._m - 1) * (paces[0] + paces[1]) + found[2] + self._remaining[left, end]
        if not left:
            least = least + self._last[begin, end]
        return found, least + self._allowed[device, begin, end]


def _minimax(held: Times, later: Times) -> Times:
    """Return the least that the blocks from a layer on can take, by how many they are and by that layer."""
    devices, size = held.shape[0], held.shape[1]
    best = np.full((devices + 1, size), np.inf)
    best[0, -1] = -np.inf
    after = np.triu(np.ones((size, size), bool), 1)
    for count in range(1, devices + 1):
        longest = np.maximum(held[devices - count], later + best[count - 1])
        best[count] = np.where(after, longest, np.inf).min(axis=1)
    return best


def _shortest(once: Times) -> Times:
    """Return the least sum over the blocks from a layer on."""
    devices, size = once.shape[0], once.shape[1]
    best = np.full((devices + 1, size), np.inf)
    best[0, -1] = 0.0
    after = np.triu(np.ones((size, size), bool), 1)
    for count in range(1, devices + 1):
        best[count] = np.where(after, once[devices - count] + best[count - 1], np.inf).min(axis=1)
    return best
