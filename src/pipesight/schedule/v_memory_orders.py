"""Orders in a V that hold little: V-Min and V-Half, made of one block of tasks that is repeated for each micro-batch.

A block says when the six tasks of a micro-batch begin on each device, if each takes one unit of time. The next
micro-batch follows six units later, so a device never has two tasks at once if its six begin at different times modulo
six. For 3 devices, of a micro-batch that goes down, up, and both ways back (`F`, `f`, `b`, `B`)::

    device 0   F           f  b           B           each hop takes a unit there and a unit back: V-Min
    device 1      F     f        b     B              weight gradients fill the two units that are left
    device 2         F  f           b  B              a device holds a micro-batch from F to W, and from f to w

What a hop takes there and back decides what is held: two units, about a third of what 1F1B holds; three, half of it,
and then tasks need not take exactly one unit each to be on time. The idea is that of "Pipeline Parallelism with
Controllable Memory" (NeurIPS 2024).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipesight.schedule.simulation import simulate
from pipesight.schedule.task_orders import B, F, Schedule, W, schedule_of
from pipesight.schedule.v_orders import v_homes
from pipesight.schedule.weight_placement import place_weights

__all__ = ["v_half", "v_min"]

PERIOD = 6
"""Tasks of a micro-batch on a device, and units of time until the next micro-batch."""
KEPT = 3
"""How many ways to a device are kept that have its tasks at the same times modulo the period."""
TRIED = 16
"""How many blocks are simulated, of those that hold least."""
RATIOS = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.4, 0.7))
"""Times of forwards, input gradients and weight gradients for which blocks are compared."""

_Block = NDArray[np.int64]
"""When the tasks of a micro-batch begin, by device: F, f, b, B, then the weight gradients w and W."""
_Times = tuple[int, int, int, int]
"""When F, f, b and B begin on one device."""


def v_min(stages: int, chunks: int, *, recompute: Sequence[bool] = ()) -> Schedule:
    """Run split backwards in a V with the least memory: on many devices, about a third of what 1F1B holds.

    Tasks wait for each other unless F, B and W take equally long.

    >>> from pipesight.schedule.memory import peak_bytes
    >>> float(peak_bytes(v_min(16, 32), inputs=[0] * 16, activations=[0.5] * 16).max())  # 1F1B holds 8 on 8 devices
    4.0
    """
    return _repeated("v-min", stages, chunks, recompute)


def v_half(stages: int, chunks: int, *, recompute: Sequence[bool] = ()) -> Schedule:
    """Run split backwards in a V with little memory: on n devices, about n / 2 + 1 micro-batches instead of n."""
    return _repeated("v-half", stages, chunks, recompute)


def _repeated(name: str, stages: int, chunks: int, recompute: Sequence[bool]) -> Schedule:
    homes = v_homes(stages, chunks)
    rows = _built(name, stages // 2, chunks).order
    return schedule_of(name, homes, chunks, [row[row[:, 0] >= 0] for row in rows], recompute)


@functools.lru_cache(maxsize=16)
def _built(name: str, n: int, chunks: int) -> Schedule:
    return _build(name, _best(name, n), chunks)


@functools.lru_cache(maxsize=64)
def _best(name: str, n: int) -> _Block:
    """Return the block with the shortest simulations of those that hold least."""
    blocks = [_with_weights(ways) for ways in _blocks(name, n)]
    held = [int(_held(block).max()) for block in blocks]
    least = sorted((block for block, most in zip(blocks, held, strict=True) if most == min(held)), key=np.max)
    times = np.array([(f, 0.0, b, w) for f, b, w in RATIOS]).T[:, None, None, :]
    return min(least[:TRIED], key=lambda block: float(simulate(_build(name, block, 2 * n + 1), times).makespan.sum()))


def _build(name: str, block: _Block, chunks: int) -> Schedule:
    """Repeat a block, with weight gradients where a device would wait while the pipeline fills and drains."""
    n = block.shape[1]
    orders = []
    for d in range(n):
        low, high = d, 2 * n - 1 - d
        tasks = np.array([(F, low), (F, high), (B, high), (B, low), (W, high), (W, low)])
        i = np.arange(chunks)
        order = np.column_stack([np.repeat(tasks, chunks, axis=0), np.tile(i, len(tasks))])
        orders.append(order[np.argsort((block[:, d, None] + PERIOD * i).ravel(), kind="stable")])
    repeated = schedule_of(name, v_homes(2 * n, chunks), chunks, orders)
    unit = [[1.0] * 2 * n] * 4
    return place_weights(repeated, unit, [1.0] * 2 * n, [float(_held(block).max())] * n)


def _blocks(name: str, n: int) -> Iterator[_Block]:
    """Yield blocks without weight gradients, from the last device to the first, short ones where there are many."""
    hops = [(1, 1, 1, 1)]  # how much earlier F and b, and later f and B, run one device before
    if name == "v-half":
        hops = [(a, b, 3 - b, 3 - a) for a in (1, 2) for b in (1, 2)]
    ways: dict[tuple[int, ...], list[list[_Times]]] = {}
    for stay, later, stay_again in itertools.product(range(1, PERIOD), range(PERIOD), range(1, PERIOD)):
        _keep(ways, [(0, stay, stay + later, stay + later + stay_again)])
    for _ in range(n - 1):
        before, ways = ways, {}
        for way in itertools.chain.from_iterable(before.values()):
            f1, f2, b2, b1 = way[-1]
            for a, b, c, d in hops:
                _keep(ways, [*way, (f1 - a, f2 + b, b2 - c, b1 + d)])
    for way in itertools.chain.from_iterable(ways.values()):
        block = np.array(way[::-1]).T
        turn = (block[2, 0] - block[1, 0] - 1) % PERIOD + 1  # the backward follows its forward on the first device
        block[2:] += block[1, 0] + turn - block[2, 0]
        yield block - block[0, 0]


def _keep(ways: dict[tuple[int, ...], list[list[_Times]]], way: list[_Times]) -> None:
    """Add a way if its last device has no two tasks at once, and few others are as good."""
    key = tuple(time % PERIOD for time in way[-1])
    if len({*key}) == len(key) and len(others := ways.setdefault(key, [])) < KEPT:
        others.append(way)


def _with_weights(ways: _Block) -> _Block:
    """Put the weight gradients where nothing else is, on each device so that it holds least."""
    used = (ways[..., None] % PERIOD == np.arange(PERIOD)).sum(axis=0)
    free = np.argsort(used, axis=1, kind="stable")[:, :2].T
    found = []
    for of_second, of_first in (free, free[::-1]):
        second = ways[2] + 1 + (of_second - ways[2] - 1) % PERIOD
        first = ways[3] + 1 + (of_first - ways[3] - 1) % PERIOD
        found.append(np.concatenate([ways, second[None], first[None]]))
    one, other = found
    return np.where(_held(one) <= _held(other), one, other)


def _held(block: _Block) -> NDArray[np.int64]:
    """Return the most stages of micro-batches that each device holds while blocks are repeated."""
    now = np.arange(PERIOD) + PERIOD * (int(block.max()) // PERIOD + 2)
    found = np.zeros((block.shape[1], PERIOD), np.int64)
    for first, last in ((0, 5), (1, 4)):
        begun = (now - block[first][:, None]) // PERIOD
        found += begun - (now - 1 - block[last][:, None]) // PERIOD
    return np.asarray(found.max(axis=1))
