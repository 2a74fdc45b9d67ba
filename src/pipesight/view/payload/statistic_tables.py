"""Statistics as the page draws them: for each statistic of each tensor, a table of layers by steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pipesight.analysis.nonfinite import place_of, rank_of
from pipesight.runs.reading.event_codes import PHASES
from pipesight.runs.reading.stats_and_logs import is_nonfinite

__all__ = ["Mark", "Marks", "Value", "statistics_of"]

DIGITS = 5
"""Digits of a value: more than a screen shows."""

Value: TypeAlias = float | str | None
"""A number, nothing, or what is not finite: "nan", "inf", "-inf", or a number "without 1 Inf" that its tensor has."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What of a tensor was not finite in a step, and where the first of it was computed, as far as its line says."""

    text: str
    partition: int | None = None
    microbatch: int | None = None
    phase: int | None = None


@dataclass(slots=True)
class Marks:
    """Tensors that were not finite: for each step those of each layer, by layer, tensor and rank."""

    of_step: dict[int, dict[tuple[str, str, int], Mark]] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add what a line of statistics says, if it says such a thing."""
        if not is_nonfinite(line):
            return
        counts = _counts(line)
        marks = self.of_step.setdefault(line["iteration"], {})
        key = line["layer"], line["tensor"], rank_of(line)
        if key in marks and (not counts or " is " not in marks[key].text):
            return
        phase = line.get("phase")
        marks[key] = Mark(
            counts or f"{line.get('statistic')} is {line.get('nonfinite')}",
            partition=_number(line, "partition"),
            microbatch=_number(line, "microbatch"),
            phase=PHASES.index(phase) if phase in PHASES else None,
        )


def statistics_of(
    lines: Iterable[Mapping[str, Any]], *, most: int, layers: Sequence[str] = ()
) -> tuple[dict[str, Any] | None, Marks]:
    """Return the tables, and the tensors that were not finite.

    Of more values than ``most``, every second step or more is dropped, but none with a value that is not finite.
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
        # Of ranks that log the same layer, the first is shown that is not finite, or else the first.
        values, value = table.setdefault(line["layer"], {}), _value(line)
        if isinstance(value, str) and not isinstance(values.get(line["iteration"]), str):
            values[line["iteration"]] = value
        values.setdefault(line["iteration"], value)
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


def _number(line: Mapping[str, Any], key: str) -> int | None:
    value = line.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _counts(line: Mapping[str, Any]) -> str:
    """Say how many elements of a tensor are not finite, such as ``17 NaN and 1 Inf``, if any are."""
    counts = ((_number(line, key) or 0, name) for key, name in (("nans", "NaN"), ("infs", "Inf")))
    return " and ".join(f"{count:,} {name}" for count, name in counts if count > 0)


def _value(line: Mapping[str, Any]) -> Value:
    """Return the value. A tensor with NaN or Inf has that of its other elements, marked as such."""
    value, counts = line["value"], _counts(line)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            return str(float(value))
        return f"{value:.{DIGITS}g} without {counts}" if counts else float(f"{value:.{DIGITS}g}")
    named = line.get("nonfinite")
    return named if named in ("nan", "inf", "-inf") else "nan" if counts else None
