"""A comparison of two or more runs as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from pipesight.analysis.compared_curves import ComparedCurve
from pipesight.analysis.comparison import Comparison, Difference
from pipesight.view.report_json import as_json

__all__ = ["comparison_as_json"]


def comparison_as_json(comparison: Comparison, *more: Comparison) -> dict[str, Any]:
    """Return a comparison as what `json.dumps` takes, with all reports; ``more`` are with the same first run."""
    return {
        "format": "pipesight-comparison",
        "format_version": 1,
        "first": as_json(comparison.first),
        **_against_first(comparison),
        "more": [_against_first(other) for other in more],
    }


def _against_first(comparison: Comparison) -> dict[str, Any]:
    return {
        "text": comparison.text,
        "settings": {name: {"first": a, "second": b} for name, (a, b) in comparison.settings.items()},
        "quantities": {name: _difference(entry) for name, entry in comparison.quantities.items()},
        "parts": {name: _difference(entry) for name, entry in comparison.parts.items()},
        "memory": {name: _difference(entry) for name, entry in comparison.memory.items()},
        "layers": [{**asdict(layer), "change": layer.change} for layer in comparison.layers],
        "curves": [_curve(curve) for curve in comparison.curves],
        "second": as_json(comparison.second),
    }


def _curve(curve: ComparedCurve) -> dict[str, Any]:
    first, second = ([_finite(value) for value in values] for values in curve.values)
    return {"name": curve.name, "steps": list(curve.steps), "first": first, "second": second}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _difference(difference: Difference) -> dict[str, float]:
    return {**asdict(difference), "change": difference.change}
