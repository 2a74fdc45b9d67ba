"""The spans of main threads as the page draws them: rows below each other, an inner span under the one around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipesight.analysis.curves import Curve, Moment
from pipesight.analysis.program_time import OWN

__all__ = ["KIND_NAMES", "Names", "curve_columns", "kind_of", "moments_between", "span_columns"]

KIND_NAMES = (
    "data_loading",
    "optimizer",
    "checkpoints",
    "communication",
    "own",
    "forward",
    "loss",
    "recompute",
    "backward",
    "copies",
    "evaluation",
    "between",
)
"""What spans can be, by the number that the page has for them; the first four are those of main threads."""
POINTS = 1_000
"""The most steps of a curve that are in the page."""


def kind_of(part: str) -> int:
    """Return the number of a part of a step."""
    return KIND_NAMES.index("own" if part.startswith(OWN) else part)


class Names:
    """Names, each kept once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        """Return the place of a name."""
        if name not in self._places:
            self._places[name] = len(self.all)
            self.all.append(name)
        return self._places[name]


def span_columns() -> dict[str, list[int]]:
    """Return the columns of the spans of a step, without rows."""
    return {name: [] for name in ("rank", "kind", "begin", "time", "name", "level")}


def moments_between(moments: Sequence[Moment], begin: int, end: int, *, most: int = 1_000) -> list[list[Any]]:
    """Return the instants between two times: rank, time, name and arguments."""
    inside = [moment for moment in moments if begin <= moment.time < end]
    return [[one.rank, one.time - begin, one.name, one.values] for one in inside[:most]]


def curve_columns(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return curves with at most so many steps: evenly spread ones, the last, and all that are not finite."""
    found = []
    for curve in curves[:32]:
        every = -(-len(curve.steps) // POINTS)
        bad = [k for k, value in enumerate(curve.values) if not np.isfinite(value)][:POINTS]
        kept = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1, *bad})
        found.append(
            {
                "name": curve.name,
                "steps": [curve.steps[k] for k in kept],
                "values": [_value(curve.values[k]) for k in kept],
                "every": every,
            }
        )
    return found


def _value(value: float) -> float | str:
    if np.isfinite(value):
        return float(f"{value:.6g}")
    return "nan" if np.isnan(value) else "inf" if value > 0 else "-inf"
