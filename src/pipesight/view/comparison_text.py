"""A comparison of two or more runs as text; the page shows the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from pipesight._formatting import percent, rate, signed_time, size, time
from pipesight._plurals import plural
from pipesight.analysis.compared_curves import STEP_TIME, compared_curves
from pipesight.analysis.compared_layers import CHANGED
from pipesight.analysis.comparison import ALLOCATED, PEAK, Comparison, Difference, title_of
from pipesight.analysis.report import Report
from pipesight.view.text_layout import LEAST, Style, columns, shown_width, spark

__all__ = [
    "MARKS",
    "changed_layers",
    "compared_runs",
    "layer_rows",
    "layers_of",
    "memory_rows",
    "part_rows",
    "quantity_rows",
    "render_comparison",
    "settings_text",
    "text_of",
]

LAYERS = 8
"""How many layers that changed are listed."""
MEMORY = 24
"""Likewise rows of memory."""
CURVES = 8
"""Likewise curves."""
MARKS = ascii_uppercase
"""What runs are called, in their order."""


def settings_text(comparison: Comparison) -> str:
    """Say which settings differ."""
    if comparison.first.logged is not None or comparison.second.logged is not None:
        return "A training log has no settings to compare"
    differ = [f"{name} {_plain(one)} -> {_plain(other)}" for name, (one, other) in comparison.settings.items()]
    return f"Different settings: {', '.join(differ)}" if differ else "The recorded settings are the same"


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def render_comparison(
    comparison: Comparison, *more: Comparison, width: int = 80, colour: bool = False, ascii: bool = False
) -> str:
    """Write a comparison as text; ``more`` compares further runs with the same first one."""
    style = Style(max(width, LEAST), colour, ascii)
    runs = compared_runs(comparison, *more)
    lines = []
    for mark, one in zip(MARKS[1:], (comparison, *more), strict=False):
        headline = style.wrapped(text_of(one, mark) if more else one.text)
        lines += [style.paint(line, "bold") for line in headline]
    lines.append("")
    for mark, report in zip(MARKS, runs, strict=False):
        lines.append(f"{mark}  {style.plain(report.path)}")
        if mark != MARKS[0] and (more or mark == MARKS[1]):
            lines += style.wrapped(settings_text((comparison, *more)[MARKS.index(mark) - 1]), indent="   ", first="")
    lines += ["", *_fitting(_rows(comparison, more, style), style)]
    if all_layers := layers_of(comparison, *more):
        others = _others(len(all_layers), len(changed_layers(comparison, *more)))
        lines += [style.paint(line, "dim") for line in style.wrapped(others, indent="  ")]
    lines += _curve_lines(runs, style)
    text = "\n".join(line for whole in lines for line in style.folded(whole)) + "\n"
    return text.replace("µs", "us") if ascii else text


def compared_runs(comparison: Comparison, *more: Comparison) -> list[Report]:
    """Return the runs that are compared, the first one first."""
    return [comparison.first, comparison.second, *(other.second for other in more)]


def text_of(comparison: Comparison, mark: str) -> str:
    """Return the headline with what the second run is called, where there are more than two."""
    return comparison.text.replace("The second run", mark).replace("the second run", mark)


def _rows(comparison: Comparison, more: Sequence[Comparison], style: Style) -> list[list[str]]:
    heads = [*MARKS[: len(more) + 2], *(() if more else ("difference",))]
    gap = [""] * (len(heads) + 1)
    rows = [["", *heads], *quantity_rows(comparison, *more), gap, *part_rows(comparison, *more)]
    if of_memory := memory_rows(comparison, *more):
        rows += [gap, *of_memory]
    if changed := layer_rows(comparison, *more, most=LAYERS):
        rows += [gap, ["layers that changed", *gap[1:]]]
        rows += [[f"  {style.plain(name)}", *cells] for name, *cells in changed]
    return rows


def _fitting(rows: Sequence[Sequence[str]], style: Style) -> list[str]:
    painted = [[style.paint(cell, "dim") for cell in rows[0]], *rows[1:]]
    names = 32 if style.width >= 80 else 22
    tables = [columns(painted, align="l" + "r" * (len(rows[0]) - 1), gap=gap, names=names) for gap in (4, 2, 1)]
    found = next((table for table in tables if max(map(shown_width, table)) <= style.width), None)
    return found or [line for row in rows[1:] for line in _stacked(row, rows[0], style)]


def _stacked(row: Sequence[str], heads: Sequence[str], style: Style) -> list[str]:
    """Write a row of a table that is too wide as a line for its name, and one or more for its cells."""
    marked = zip(heads[1:], row[1:], strict=True)
    cells = [f"{mark} {cell}" if mark in MARKS else cell for mark, cell in marked if cell]
    lines = [row[0], *style.wrapped(" | ".join(cells), indent="    ")]
    return lines if cells else lines[:1]


def _curve_lines(runs: Sequence[Report], style: Style) -> list[str]:
    """Draw each curve of all runs over the same steps and the same values."""
    curves = compared_curves(runs)
    if not curves:
        return []
    drawn = max(8, min(40, style.width - 30))
    lines = ["", style.paint("Curves over steps (first -> last)", "bold")]
    for curve in curves[:CURVES]:
        finite = [value for own in curve.values for value in own if value is not None and math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        write = time if curve.name == STEP_TIME else "{:.4g}".format
        lines.append(f"  {style.cut(curve.name, style.width - 2)}")
        rows = []
        for mark, own in zip(MARKS, curve.values, strict=False):
            values = [value for value in own if value is not None]
            if values:
                above = [value if value is None else value - low if math.isfinite(value) else 0.0 for value in own]
                line = spark(above, drawn, top=(high - low) or 1.0, ascii=style.ascii)
                rows.append([f"  {mark}", line, write(values[0]), "->", write(values[-1])])
        lines += columns(rows, align="llrlr", gap=1)
    if len(curves) > CURVES:
        lines.append(style.paint(f"  and {len(curves) - CURVES} more", "dim"))
    return lines


def quantity_rows(comparison: Comparison, *more: Comparison) -> list[list[str]]:
    """Write each quantity: its name, in the first run, in the second, and what differs; with more, in each of them."""
    all_known = [one.quantities for one in (comparison, *more)]
    shown = [row for row in _QUANTITIES if all(row[0] in known for known in all_known)]
    return [[title, *_cells([known[name] for known in all_known], write)] for name, title, write in shown]


def part_rows(comparison: Comparison, *more: Comparison) -> list[list[str]]:
    """Write the mean step in the same way, then the parts that matter."""
    all_parts = [one.parts for one in (comparison, *more)]
    if not any(all_parts):
        return []
    wholes = [
        Difference(sum(part.first for part in parts.values()), sum(part.second for part in parts.values()))
        for parts in all_parts
    ]
    least = max(wholes[0].first, 1e-9) * 0.0005
    # A run that has no such part spends no time on it, and the first run's is then known from another comparison.
    names = dict.fromkeys(name for parts in all_parts for name in parts)
    firsts = {name: max(parts[name].first for parts in all_parts if name in parts) for name in names}
    rows = [["step time, mean", *_cells(wholes, time)]]
    for name in names:
        row = [parts.get(name, Difference(firsts[name], 0.0)) for parts in all_parts]
        if max(max(part.first, part.second) for part in row) >= least:
            rows.append([title_of(name), *_cells(row, time)])
    return rows


def memory_rows(comparison: Comparison, *more: Comparison) -> list[list[str]]:
    """Write the peaks of memory in the same way: of the fullest device, what it is made of, and of each device."""
    all_known = [one.memory for one in (comparison, *more)]
    names = [name for name in comparison.memory if all(name in known for known in all_known)]
    rows = []
    for name in names:
        row = [known[name] for known in all_known]
        if any(one.first or one.second for one in row):
            rows.append([_MEMORY.get(name, name), *_cells(row, size)])
    return rows[:MEMORY]


def layers_of(*comparisons: Comparison) -> list[str]:
    """Return the layers of all runs."""
    return [*dict.fromkeys(layer.name for one in comparisons for layer in one.layers)]


def changed_layers(*comparisons: Comparison) -> list[str]:
    """Return the layers that changed in any run, those that differ most first."""
    most: dict[str, float] = {}
    for layer in (layer for one in comparisons for layer in one.layers if layer.changed):
        most[layer.name] = max(most.get(layer.name, 0.0), abs(layer.change))
    return sorted(most, key=lambda name: -most[name])


def layer_rows(*comparisons: Comparison, most: int) -> list[list[str]]:
    """Write the layers that changed in the same way."""
    known = [{layer.name: layer for layer in one.layers} for one in comparisons]
    rows = []
    for name in changed_layers(*comparisons)[:most]:
        first = next(own[name].first for own in known if name in own) or 0.0
        seconds = [(own[name].second or 0.0) if name in own else 0.0 for own in known]
        rows.append([name, *_cells([Difference(first, second) for second in seconds], time)])
    return rows


def _others(layers: int, changed: int) -> str:
    """Say how many layers are not listed, and why."""
    same, more = layers - changed, max(changed - LAYERS, 0)
    words = [f"{more:,} more layers changed"] if more else []
    if same:
        words.append(f"{same:,} {plural(same, 'layer takes', 'layers take')} the same time, to within {CHANGED:.0%}")
    return f"{'; '.join(words)}." if words else ""


_MEMORY = {
    PEAK: "memory, fullest device",
    ALLOCATED: "allocated at most",
    "optimizer_state": "optimizer state",
}
_QUANTITIES = (
    ("step_time", "step time, median", time),
    ("steps_per_second", "steps/s", rate),
    ("samples_per_second", "samples/s", rate),
    ("microbatches_per_second", "micro-batches/s", rate),
    ("bubble", "bubble", percent),
    ("bound", "schedule alone", percent),
    ("recompute", "recompute", percent),
    ("same_layers", "same layers, micro-batch", time),
)


def _cells(differences: Sequence[Difference], write: Any) -> list[str]:
    """Write a row: the first run, and the second with what differs; of several, each with its own difference."""
    values = [differences[0].first, *(one.second for one in differences)]
    shown = [write(value) if value or write is not time else "-" for value in values]
    if len(differences) == 1:
        return [*shown, _change(differences[0], write)]
    changes = [_change(one, write, short=True) for one in differences]
    pairs = zip(shown[1:], changes, strict=True)
    return [shown[0], *(value if "-" in (value, change) else f"{value} {change}" for value, change in pairs)]


def _change(difference: Difference, write: Any, *, short: bool = False) -> str:
    if write is percent:
        return f"{difference.change * 100:+.1f} points" if abs(difference.change) >= 0.0005 else "-"
    share = difference.change / difference.first if difference.first else 0.0
    change = f"{share:+.{int(abs(share) < 10)}%}" if difference.first and abs(share) >= 0.0005 else "-"
    if write is time and abs(difference.change) >= 0.05 and not short:
        change = f"{signed_time(difference.change)}" + (f" ({change})" if difference.first else "")
    return change
