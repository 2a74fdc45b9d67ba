"""Ranks that delay the others: always, or now and then.

A partition that several ranks have is compared over these, since they do the same work; what partitions differ among
each other is imbalance. A burst is a step in which one takes much longer than it usually does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PartitionTimes", "Straggler", "find_stragglers"]

SLOWER = 1.1
"""A lane is slow from this many times the median of the same partition on other ranks."""
BURST = 1.5
"""A step is a burst from this many times the lane's own median."""
SHORTEST = 100.0
"""The least microseconds that a burst costs."""


@dataclass(frozen=True, slots=True, eq=False)
class PartitionTimes:
    """A partition of a rank: how long it computed in each step, in microseconds."""

    rank: int
    partition: int
    step: NDArray[np.int64]
    busy: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A lane that is slower than the same partition on other ranks, or at times than itself."""

    rank: int
    """The rank that is slow."""
    partition: int
    """The partition it runs."""
    slower: float | None
    """How many times the median of the other ranks it takes, if it is slow."""
    bursts: tuple[int, ...]
    """The steps in which it took much longer than usual."""
    burst: float
    """How many times as long it took in these, at the median."""


def find_stragglers(lanes: Sequence[PartitionTimes]) -> list[Straggler]:
    """Return the lanes that delay others, the slowest first."""
    lanes = [lane for lane in lanes if len(lane.busy) and np.median(lane.busy) > 0]
    usual = np.array([np.median(lane.busy) for lane in lanes])
    partitions = np.array([lane.partition for lane in lanes])
    late = [
        (lane.busy >= BURST * mine) & (lane.busy - mine >= SHORTEST) for lane, mine in zip(lanes, usual, strict=True)
    ]
    alone = _few_are_late(lanes, late)
    found = []
    for k, lane in enumerate(lanes):
        peers = usual[(np.arange(len(lanes)) != k) & (partitions == lane.partition)]
        ratio = usual[k] / np.median(peers) if len(peers) else 1.0
        bursts = late[k] & np.isin(lane.step, alone)
        if ratio >= SLOWER or bursts.any():
            found.append(
                Straggler(
                    rank=lane.rank,
                    partition=lane.partition,
                    slower=float(ratio) if ratio >= SLOWER else None,
                    bursts=tuple(lane.step[bursts].tolist()),
                    burst=float(np.median(lane.busy[bursts]) / usual[k]) if bursts.any() else 1.0,
                )
            )
    return sorted(found, key=lambda straggler: (-(straggler.slower or 0), -len(straggler.bursts), straggler.rank))


def _few_are_late(lanes: Sequence[PartitionTimes], late: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return the steps in which at most half of the lanes are late; in a long step, or on a busy machine, all are."""
    if not lanes:
        return np.zeros(0, np.int64)
    steps, which = np.unique(np.concatenate([lane.step for lane in lanes]), return_inverse=True)
    there, behind = np.bincount(which), np.bincount(which, np.concatenate(late))
    few: NDArray[np.int64] = steps[2 * behind <= there]
    return few
