"""Statistics as the page draws them: for each statistic of each tensor, a table of layers by steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pipesight.report.analysis.nonfinite import is_bad, place_of, rank_of

__all__ = ["Marks", "Value", "statistics_of"]

DIGITS = 5
"""That a value keeps: more than a screen shows."""

Value: TypeAlias = float | str | None
"""A number, "nan", "inf", "-inf", or nothing."""


@dataclass(slots=True)
class Marks:
    """Tensors that were not finite: for each step the layer, the tensor, the rank and how many elements."""

    of_step: dict[int, dict[tuple[str, str], tuple[int, str]]] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add what a line of statistics says, if it says such a thing."""
        if not is_bad(line):
            return
        counts = [f"{line[key]:,} {name}" for key, name in (("nans", "NaN"), ("infs", "Inf")) if _is_count(line, key)]
        if not counts:
            counts = [f"{line.get('statistic')} is {line.get('nonfinite')}"]
        marks = self.of_step.setdefault(line["iteration"], {})
        known = marks.get((line["layer"], line["tensor"]))
        if known is None or "is" in known[1]:
            marks[line["layer"], line["tensor"]] = rank_of(line), " and ".join(counts)


def statistics_of(
    lines: Iterable[Mapping[str, Any]], *, most: int, layers: Sequence[str] = ()
) -> tuple[dict[str, Any] | None, Marks]:
    """Return the tables, and the tensors that were not finite.

    Where there are more values than ``most``, every second step is left out, or more, but none that is not finite.
    Rows are in the order of ``layers``, the names of the model's: lines come rank by rank, and a rank may have any.
    """
    places = {name: place for place, name in enumerate(layers)}
    tables: dict[tuple[str, str], dict[str, dict[int, Value]]] = {}
    marks = Marks()
    for line in lines:
        if not _is_value(line):
            continue
        marks.add(line)
        table = tables.setdefault((line["tensor"], line["statistic"]), {})
        # Of ranks that log the same layer, the first is shown.
        table.setdefault(line["layer"], {}).setdefault(line["iteration"], _value(line))
    if not tables:
        return None, marks
    tables = {key: dict(sorted(rows.items(), key=lambda row: place_of(row[0], places))) for key, rows in tables.items()}
    count = sum(len(values) for table in tables.values() for values in table.values())
    stride = max(math.ceil(count / max(most, 1)), 1)
    names: dict[str, int] = {}
    groups = [_group(key, table, stride, set(marks.of_step), names) for key, table in tables.items()]
    return {"names": list(names), "groups": groups, "left_out": stride if stride > 1 else 0}, marks


def _group(
    key: tuple[str, str], layers: Mapping[str, Mapping[int, Value]], stride: int, kept: set[int], names: dict[str, int]
) -> dict[str, Any]:
    steps = sorted({step for values in layers.values() for step in values})
    steps = [step for place, step in enumerate(steps) if place % stride == 0 or step in kept or step == steps[-1]]
    return {
        "tensor": key[0],
        "statistic": key[1],
        "layers": [names.setdefault(layer, len(names)) for layer in layers],
        "steps": steps,
        "values": [values.get(step) for values in layers.values() for step in steps],
    }


def _is_value(line: Mapping[str, Any]) -> bool:
    texts = all(isinstance(line.get(key), str) for key in ("layer", "tensor", "statistic"))
    iteration = line.get("iteration")
    return texts and isinstance(iteration, int) and not isinstance(iteration, bool) and "value" in line


def _is_count(line: Mapping[str, Any], key: str) -> bool:
    return isinstance(line.get(key), int) and line[key] > 0


def _value(line: Mapping[str, Any]) -> Value:
    value = line["value"]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    named = line.get("nonfinite")
    return named if named in ("nan", "inf", "-inf") else None
