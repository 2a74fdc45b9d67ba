"""Memory over the steps in which it was counted, for the page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipesight.analysis.memory import PARTS, MemoryCurve, MemoryReport

__all__ = ["memory_of"]

STEPS = 4
"""So many of the last steps in which most partitions were counted are in the page."""
POINTS = 500
"""At most so many moments of a step, the evenly spread ones and the peak."""
CURVES = 32


def memory_of(memory: MemoryReport | None) -> dict[str, Any] | None:
    """Return the parts and, for each step, the curves of partitions or devices; ``None`` without any."""
    if memory is None or not memory.curves:
        return None
    # Ranks may count memory in different steps; one that misses partitions would look as if these held nothing.
    counted = Counter(step for curve in memory.curves for step in set(curve.steps))
    most = max(counted.values())
    steps = sorted(step for step, curves in counted.items() if curves == most)[-STEPS:]
    return {"parts": list(PARTS), "steps": [_step(memory, step) for step in steps]}


def _step(memory: MemoryReport, step: int) -> dict[str, Any]:
    curves = [curve for curve in memory.curves if step in curve.steps][:CURVES]
    begin = min(curve.times[curve.steps.index(step)] for curve in curves)
    return {"number": step, "curves": [_curve(curve, step, begin) for curve in curves]}


def _curve(curve: MemoryCurve, step: int, begin: int) -> dict[str, Any]:
    rows = [k for k, number in enumerate(curve.steps) if number == step]
    totals = {k: sum(part[k] for part in curve.values) for k in rows}
    peak = max(rows, key=totals.__getitem__)
    kept = sorted({*rows[:: -(-len(rows) // POINTS)], peak, rows[-1]})
    return {
        "name": f"partition {curve.partition}" if curve.partition is not None else curve.device,
        "rank": curve.rank,
        "times": [curve.times[k] - begin for k in kept],
        "values": [[part[k] for k in kept] for part in curve.values],
        "peak": totals[peak],
    }
