"""Whether what one place loses is more than chance explains: on a busy machine some rank is always the slowest.

Places that do the same work lose about the same, step by step, but for chance. What chance does is seen in the others:
how much the steps of each differ, and for how many steps in a row it stays slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from pipesight.runs.reading.event_tables import Column

__all__ = ["alike", "beyond_chance", "loses_most"]

LIKEST = 0.95
"""How like the one before a step is taken to be at most."""
WRONGLY = 0.01
"""Of jobs in which all places are equal, the share in which one is found to lose more."""
FEWEST = 3
"""Steps from which it can be told how much they differ."""


def alike(series: Sequence[Column]) -> float:
    """Return how far steps deviate from the mean as the steps before them did: from 0, not at all, to `LIKEST`.

    A mean of n steps that are r alike varies as that of n (1 - r) / (1 + r) steps that know nothing of each other.

    Args:
        series: Deviations from their means.
    """
    squares = sum(float((part**2).sum()) for part in series)
    found = sum(float((part[1:] * part[:-1]).sum()) for part in series) / max(squares, 1e-9)
    return min(max(found + (1 + 3 * found) * len(series) / max(sum(map(len, series)), 1), 0.0), LIKEST)


def beyond_chance(lost: Column, place: int, *, kinds: int = 1) -> bool:
    """Return whether the place that loses most loses more than the others do by chance.

    Args:
        lost: What each place loses in each step: a row for each place.
        place: The one that loses most.
        kinds: How many kinds of places are looked at.
    """
    others = np.delete(lost, place, axis=0)
    count, steps = others.shape
    if not count or steps < FEWEST:
        return True
    more = float(lost[place].mean() - np.median(others.mean(axis=1)))
    # Told by the others, if it is slow in some steps, and by all, if it always is: half of the chance for each.
    wrongly = WRONGLY / (2 * kinds * (count + 1))
    return any(more > _most_by_chance(known, count, 1 - wrongly) for known in (others, lost))


def loses_most(lost: Column, place: int, *, kinds: int = 1) -> bool:
    """Return whether a place loses more than others that do the same, where all lose much in some steps.

    It does if its mean is beyond chance, as far as all steps show what chance does; or if more of the largest losses
    in a row are its own than would be by chance, which says nothing of how much these are apart.
    """
    places, steps = lost.shape
    if places < 2 or steps < FEWEST:
        return True
    wrongly = WRONGLY / (2 * kinds * places)
    others = np.delete(lost, place, axis=0)
    if float(lost[place].mean() - np.median(others.mean(axis=1))) > _most_by_chance(lost, places - 1, 1 - wrongly):
        return True
    larger = int((lost[place] > others.max()).sum())
    return bool(places ** -float(larger) < wrongly)


def _most_by_chance(lost: Column, others: int, probability: float) -> float:
    """Return by how much the mean of one place is above that of some others at most, as far as chance goes."""
    count, steps = lost.shape
    apart = [*(lost - lost.mean(axis=1, keepdims=True))]
    likeness = alike(apart)
    independent = max(steps * (1 - likeness) / (1 + likeness), 2.0)
    variance = sum(float((part**2).sum()) for part in apart) / (count * (steps - 1))
    return _student(probability, (independent - 1) * count) * math.sqrt(variance / independent * (1 + 1 / others))


def _student(probability: float, freedom: float) -> float:
    """Return the quantile of Student's distribution, from that of the normal one by the first terms of its series.

    >>> round(_student(0.99, 10), 2), round(_student(0.999, 30), 2)
    (2.76, 3.38)
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))
