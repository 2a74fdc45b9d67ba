"""A comparison of two runs as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipesight.analysis.comparison import Comparison, Difference
from pipesight.view.report_json import as_json

__all__ = ["comparison_as_json"]


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as what `json.dumps` takes; both reports are in it."""
    return {
        "format": "pipesight-comparison",
        "format_version": 1,
        "text": comparison.text,
        "settings": {name: {"first": a, "second": b} for name, (a, b) in comparison.settings.items()},
        "quantities": {name: _difference(entry) for name, entry in comparison.quantities.items()},
        "parts": {name: _difference(entry) for name, entry in comparison.parts.items()},
        "layers": [{**asdict(layer), "change": layer.change} for layer in comparison.layers],
        "first": as_json(comparison.first),
        "second": as_json(comparison.second),
    }


def _difference(difference: Difference) -> dict[str, float]:
    return {**asdict(difference), "change": difference.change}
