"""How far the clocks of the ranks of a pipeline can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipesight.runs.reading.event_tables import Tasks

__all__ = ["clock_error", "doubts_about_clocks"]

NOTABLE = 0.1
"""The error of clocks that gets a remark, as a share of the median task."""


def doubts_about_clocks(description: Mapping[str, Any], tasks: Tasks) -> str | None:
    """Return a remark on the clocks; ``None`` if they agree well enough, or if nothing depends on them."""
    entries, clock = description.get("pipelines"), description.get("clock")
    if not any("ranks" in entry for entry in (entries if isinstance(entries, list) else []) if isinstance(entry, dict)):
        return None
    if not isinstance(clock, dict) or not len(tasks) or tasks.rank.min() == tasks.rank.max():
        return None
    error = clock.get("error_ns")
    if not isinstance(error, int):
        return "not all ranks' clocks were compared, so waits between ranks may be wrong"
    usual = float(np.median(tasks.end - tasks.begin))
    if error / 1000 < NOTABLE * usual:
        return None
    return (
        f"the ranks' clocks agree to within {error / 1000:,.0f} µs and the median task takes {usual:,.0f} µs, so short "
        "waits between ranks may be wrong"
    )


def clock_error(description: Mapping[str, Any], one: int, other: int) -> float | None:
    """Return the error of times between two ranks, in microseconds: the sum of the errors of their clocks."""
    clock = description.get("clock")
    ranks = clock.get("ranks") if isinstance(clock, dict) else None
    total = 0.0
    for rank in (one, other):
        if rank == 0:
            continue  # the clock that others are compared with
        own = ranks.get(str(rank)) if isinstance(ranks, dict) else None
        error = own.get("error_ns") if isinstance(own, dict) else None
        if not isinstance(error, int):
            return None
        total += error / 1000
    return total
