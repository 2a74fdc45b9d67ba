"""Which steps a page shows, where there is no room for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pipesight.runs.reading.event_tables import Column

__all__ = ["choose_steps"]

SLOWEST = 100
"""How many of the slowest steps come before others."""


def choose_steps(
    times: Sequence[int] | Column,
    sizes: Sequence[int] | Column,
    *,
    most: int,
    typical: int | None = None,
    first: int | None = None,
    also: int | None = None,
) -> list[int]:
    """Return the places of steps to show, those that matter most first; the first of them always is one.

    They are the one that is asked for, the typical one, the last, the slowest, the first, and others evenly between;
    one in five of these is instead the next slowest.

    Example::

        >>> choose_steps([10, 30, 20, 20, 20], [8, 8, 8, 8, 8], most=32)
        [2, 4, 1, 0]

    There is room for ``most`` blocks; ``sizes`` has those of each step. ``typical`` is by default the step of median
    length. The place ``first`` comes before all others, and ``also`` right after it and the typical one.
    """
    if not len(times):
        return []
    chosen: dict[int, None] = {}
    room = most
    usual = [*_by_importance(np.asarray(times), typical)]
    wanted = ([first], usual[:1], [also], usual[1:])
    for place in (place for places in wanted for place in places if place is not None):
        if place in chosen or (chosen and sizes[place] > room):
            continue
        chosen[place] = None
        room -= int(sizes[place])
    return list(chosen)


def _median_place(times: Column) -> int:
    """Return the place of the step of median length: of those, the middle one."""
    distance = np.abs(times - np.median(times))
    closest = np.flatnonzero(distance == distance.min())
    return int(closest[len(closest) // 2])


def _by_importance(times: Column, typical: int | None) -> Iterator[int]:
    yield _median_place(times) if typical is None else typical
    yield len(times) - 1
    yield int(np.argmax(times))
    yield 0
    slow = iter(np.argsort(-times, kind="stable")[1:SLOWEST].tolist())
    for number, place in enumerate(_evenly(len(times)), 1):
        yield place
        if number % 4 == 0:
            yield from itertools.islice(slow, 1)
    yield from range(len(times))


def _evenly(count: int) -> Iterator[int]:
    """Return halves, quarters, eighths: wherever it ends, they are spread over all steps."""
    parts = 2
    while parts < 2 * count:
        for number in range(1, parts, 2):
            yield number * (count - 1) // parts
        parts *= 2
