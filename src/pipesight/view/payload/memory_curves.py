"""Memory over the steps in which it was counted, for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipesight.analysis.memory import PARTS, MemoryCurve, MemoryReport

__all__ = ["last_counted", "memory_of"]

STEPS = 4
"""So many of the last steps in which most partitions were counted are in the page."""
POINTS = 500
"""At most so many moments of a step, the evenly spread ones and the peak."""
CURVES = 32


def last_counted(memory: MemoryReport | None) -> int | None:
    """Return the last step in which most partitions were counted."""
    return max(_counted(memory), default=None) if memory is not None else None


def memory_of(memory: MemoryReport | None, begins: Mapping[int, int]) -> dict[str, Any] | None:
    """Return the parts and, for each step that is shown, the curves of partitions or devices; ``None`` without any.

    ``begins`` says when the steps that are shown began, by their numbers.
    """
    if memory is None or not memory.curves:
        return None
    steps = [step for step in _counted(memory) if step in begins][-STEPS:]
    return {"parts": list(PARTS), "steps": [_step(memory, step, begins[step]) for step in steps]} if steps else None


def _counted(memory: MemoryReport) -> list[int]:
    """Return the steps in which most partitions were counted.

    Ranks may count memory in different steps; one that misses partitions would look as if these held nothing.
    """
    counted = Counter(step for curve in memory.curves for step in set(curve.steps))
    return sorted(step for step, curves in counted.items() if curves == max(counted.values()))


def _step(memory: MemoryReport, step: int, begin: int) -> dict[str, Any]:
    curves = [curve for curve in memory.curves if step in curve.steps][:CURVES]
    return {"number": step, "curves": [_curve(curve, step, begin) for curve in curves]}


def _curve(curve: MemoryCurve, step: int, begin: int) -> dict[str, Any]:
    rows = [k for k, number in enumerate(curve.steps) if number == step]
    totals = {k: sum(part[k] for part in curve.values) for k in rows}
    peak = max(rows, key=totals.__getitem__)
    kept = sorted({*rows[:: -(-len(rows) // POINTS)], peak, rows[-1]})
    return {
        "name": f"partition {curve.partition}" if curve.partition is not None else curve.device,
        "partition": curve.partition,
        "rank": curve.rank,
        "times": [curve.times[k] - begin for k in kept],
        "values": [[part[k] for k in kept] for part in curve.values],
        "peak": totals[peak],
    }
