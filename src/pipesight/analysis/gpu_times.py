"""What GPUs did, as PyTorch's profiler saw it: computing, communicating, moving memory, or nothing.

A moment counts once, however many streams are busy in it::

    computes       |-------|      |----|
    communicates       |-------------|
                            |----|            exposed: communication that nothing is computed beside
                                   |-|        idle
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipesight.runs.reading.event_codes import COMPUTE, MEMORY, MESSAGE
from pipesight.runs.reading.event_tables import Column, Kernels, ProfilerSteps

__all__ = ["GpuTimes", "ProfiledSteps", "gpu_times", "profiled_steps"]


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """The GPU of one rank, from the begin of its first kernel to the end of its last, in microseconds."""

    rank: int
    """The rank."""
    window: int
    """From its first kernel, copy or fill to the end of its last."""
    kernels: int
    """How many there are."""
    compute: int
    """Time in which kernels compute."""
    communication: int
    """Time in which kernels communicate."""
    memory: int
    """Time of copies and fills."""
    exposed_communication: int
    """Time in which kernels communicate and none computes."""
    idle: int
    """Time in which nothing runs."""
    gaps: int
    """How many times nothing runs."""
    longest_gap: int
    """The longest of them."""


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """The steps that PyTorch's profiler was told of, on one rank, in microseconds."""

    rank: int
    """The rank."""
    count: int
    """How many."""
    first: int
    """The number of the first."""
    last: int
    """The number of the last."""
    median: float
    """Of their times."""
    least: int
    """The shortest."""
    most: int
    """The longest."""


def gpu_times(kernels: Kernels) -> tuple[GpuTimes, ...]:
    """Return the times of each rank that used a GPU."""
    return tuple(_of_rank(int(rank), kernels.where(kernels.rank == rank)) for rank in np.unique(kernels.rank))


def profiled_steps(steps: ProfilerSteps) -> tuple[ProfiledSteps, ...]:
    """Return the steps of each rank."""
    found = []
    for rank in np.unique(steps.rank).tolist():
        own = steps.where(steps.rank == rank)
        times = own.end - own.begin
        first, last = int(own.step.min()), int(own.step.max())
        spread = float(np.median(times)), int(times.min()), int(times.max())
        found.append(ProfiledSteps(rank, len(own), first, last, *spread))
    return tuple(found)


def _of_rank(rank: int, own: Kernels) -> GpuTimes:
    busy = _union(own.begin, own.end)
    compute, message, memory = (
        _union(own.begin[rows], own.end[rows]) for rows in (own.kind == kind for kind in (COMPUTE, MESSAGE, MEMORY))
    )
    gaps = busy[0][1:] - busy[1][:-1]
    both = _union(np.append(compute[0], message[0]), np.append(compute[1], message[1]))
    return GpuTimes(
        rank=rank,
        window=int(busy[1][-1] - busy[0][0]),
        kernels=len(own),
        compute=_length(compute),
        communication=_length(message),
        memory=_length(memory),
        exposed_communication=_length(both) - _length(compute),
        idle=int(gaps.sum()),
        gaps=len(gaps),
        longest_gap=int(gaps.max(initial=0)),
    )


def _union(begin: Column, end: Column) -> tuple[Column, Column]:
    """Return begins and ends of the time that some interval covers, in order and apart from each other."""
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    new = np.append(True, begin[1:] > reached[:-1])
    return begin[new], reached[np.append(np.flatnonzero(new)[1:] - 1, len(begin) - 1)]


def _length(union: tuple[Column, Column]) -> int:
    return int((union[1] - union[0]).sum())
