"""Samples of different length, put into micro-batches with the same work, and these into the order that waits least.

A pipeline waits for its longest micro-batch in every stage. With 1F1B, most of that hides behind other micro-batches if
the longest come in the middle of a step::

    as they come   0 |FFFF|F|F|F  ...        packed   0 |FF|FF|FF|FF ...
                   1      |FFFF|F|F|F                 1    |FF|FF|FF|FF
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipesight.schedule.argument_checks import check_chunks

__all__ = ["chunk_sizes", "longest_inside", "pack"]

ENOUGH = 1e-3
"""The share of a micro-batch's work that an exchange of two samples must save to be worth it."""


def chunk_sizes(size: int, chunks: int) -> list[int]:
    """Return the sizes of the pieces that ``torch.chunk`` cuts a batch into.

    >>> chunk_sizes(10, 4)
    [3, 3, 3, 1]
    """
    piece = -(-size // chunks)
    return [min(piece, size - start) for start in range(0, size, piece)] if size else [0]


def pack(costs: Iterable[float], chunks: int) -> list[int]:
    """Return an order of samples in which all micro-batches have about the same work, the longest in the middle.

    Micro-batches are cut as the pipelines cut them: the same number of samples in each. The heaviest one is never
    heavier than it was.

    >>> pack([9, 1, 8, 2, 1, 1, 5, 5], chunks=4)
    [1, 7, 2, 4, 0, 5, 3, 6]

    Args:
        costs: How much work each sample is, in any unit: its length or, where attention matters, what that costs.
        chunks: How many micro-batches there are.
    """
    work = [float(cost) for cost in costs]
    if bad := [cost for cost in work if not (math.isfinite(cost) and cost >= 0)]:
        raise ValueError(f"costs must be finite and not negative (costs: {', '.join(map(str, bad[:4]))})")
    sizes = chunk_sizes(len(work), check_chunks(chunks))
    starts = np.cumsum([0, *sizes])
    given = [list(range(start, start + size)) for start, size in zip(starts.tolist(), sizes, strict=False)]
    packed = _exchanged(_filled(work, sizes), np.array(work))
    if _heaviest(packed, work) > _heaviest(given, work):
        packed = given
    whole = [members for members in packed if len(members) == sizes[0]]  # the last may be smaller, and stays the last
    inside = longest_inside([sum(work[k] for k in members) for members in whole])
    return [k for members in [*(whole[i] for i in inside), *packed[len(whole) :]] for k in sorted(members)]


def longest_inside(lengths: Sequence[float]) -> list[int]:
    """Return the order of micro-batches from the shortest to the longest and back.

    >>> longest_inside([5, 1, 4, 2, 3])
    [1, 4, 0, 2, 3]
    """
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    return ascending[::2] + ascending[1::2][::-1]


def _filled(work: Sequence[float], sizes: Sequence[int]) -> list[list[int]]:
    """Put each sample, the longest first, where there is least work and still room."""
    members: list[list[int]] = [[] for _ in sizes]
    lightest = [(0.0, i) for i, size in enumerate(sizes) if size]
    for k in sorted(range(len(work)), key=lambda k: -work[k]):
        load, i = heapq.heappop(lightest)
        members[i].append(k)
        if len(members[i]) < sizes[i]:
            heapq.heappush(lightest, (load + work[k], i))
    return members


def _exchanged(members: list[list[int]], work: NDArray[np.float64]) -> list[list[int]]:
    """Exchange samples of the heaviest micro-batch for others as long as it gets lighter."""
    home = np.zeros(len(work), np.int64)
    for i, samples in enumerate(members):
        home[samples] = i
    loads: NDArray[np.float64] = np.bincount(home, work, len(members)).astype(np.float64)
    least = ENOUGH * loads.mean()
    while len(work):
        heaviest = int(loads.argmax())
        own, others = np.flatnonzero(home == heaviest), np.flatnonzero(home != heaviest)
        if not len(others):
            break
        less = work[own][:, None] - work[others]  # what the heaviest gets lighter by
        after = np.maximum(loads[heaviest] - less, loads[home[others]] + less)
        a, b = np.unravel_index(after.argmin(), after.shape)
        if after[a, b] > loads[heaviest] - max(least, 1e-12):
            break
        there = home[others[b]]
        home[own[a]], home[others[b]] = there, heaviest
        loads[heaviest] -= less[a, b]
        loads[there] += less[a, b]
    return [np.flatnonzero(home == i).tolist() for i in range(len(members))]


def _heaviest(members: Sequence[Sequence[int]], work: Sequence[float]) -> float:
    return max(sum(work[k] for k in own) for own in members)
