"""Stragglers: partitions that are slow on one rank, or at times."""

from __future__ import annotations

import numpy as np

from pipesight.analysis.stragglers import PartitionTimes, find_stragglers


def lane(rank: int, partition: int, *busy: float) -> PartitionTimes:
    return PartitionTimes(rank, partition, np.arange(len(busy)), np.array(busy, float))


def test_bursts_are_found():
    """A lane that takes much longer than it usually does, alone, has a burst; if all do, none has."""
    steady = lane(0, 0, *[1000] * 8, 5000, 1000)
    bursty = lane(0, 1, *[1000] * 4, 4000, *[1000] * 3, 5000, 1000)
    (found,) = find_stragglers([steady, bursty])
    assert (found.partition, found.slower, found.bursts, found.burst) == (1, None, (4,), 4)


def test_a_partition_with_more_work_is_no_straggler():
    """Partitions are not compared with each other: that is imbalance. The same partition on other ranks is."""
    assert find_stragglers([lane(0, 0, *[1000] * 5), lane(0, 1, *[3000] * 5)]) == []
    busy = {(r, j): 1000 + 2000 * j for r in range(3) for j in range(2)} | {(2, 1): 6000}
    (found,) = find_stragglers([lane(r, j, *[time] * 5) for (r, j), time in busy.items()])
    assert (found.rank, found.partition, found.slower) == (2, 1, 2)


def test_even_lanes_are_no_stragglers():
    """Lanes that differ by less than a tenth are all right."""
    assert find_stragglers([lane(r, j, *[1000 + 20 * r] * 5) for r in range(3) for j in range(2)]) == []
