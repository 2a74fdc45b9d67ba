"""A comparison of two runs as text; the page shows the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipesight._formatting import percent, rate, signed_time, time
from pipesight._plurals import plural
from pipesight.analysis.compared_layers import CHANGED, LayerChange
from pipesight.analysis.comparison import Comparison, Difference
from pipesight.analysis.verdict import TITLES
from pipesight.view.text_layout import Style, columns, shown_width

__all__ = [
    "layer_rows",
    "part_rows",
    "quantity_rows",
    "render_comparison",
    "settings_text",
]

LAYERS = 8
"""How many layers that changed are listed."""


def settings_text(comparison: Comparison) -> str:
    """Say which settings differ."""
    differ = [f"{name} {_plain(one)} -> {_plain(other)}" for name, (one, other) in comparison.settings.items()]
    return f"Different settings: {', '.join(differ)}" if differ else "The recorded settings are the same"


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def render_comparison(comparison: Comparison, *, width: int = 80, colour: bool = False, ascii: bool = False) -> str:
    """Write a comparison as text."""
    style = Style(max(width, 60), colour, ascii)
    runs = comparison.first, comparison.second
    lines = [style.paint(line, "bold") for line in style.wrapped(comparison.text)]
    lines.append("")
    for mark, report in zip("AB", runs, strict=True):
        lines.append(f"{mark}  {style.cut(report.path, style.width - 3)}")
    lines += style.wrapped(settings_text(comparison), indent="   ", first="")
    rows = [["", "A", "B", "difference"], *quantity_rows(comparison), [""] * 4, *part_rows(comparison)]
    changed = [layer for layer in comparison.layers if layer.changed]
    if changed:
        rows += [[""] * 4, ["layers that changed", "", "", ""]]
        names = 32 if style.width >= 80 else 20
        rows += [[f"  {style.cut(name, names)}", *cells] for name, *cells in layer_rows(changed[:LAYERS])]
    rows[0] = [style.paint(cell, "dim") for cell in rows[0]]
    tables = [columns(rows, align="lrrr", gap=gap) for gap in (4, 2, 1)]
    fitting = [table for table in tables if max(map(shown_width, table)) <= style.width]
    lines += ["", *(fitting or tables[-1:])[0]]
    if comparison.layers:
        lines += [style.paint(line, "dim") for line in style.wrapped(_others(comparison, len(changed)), indent="  ")]
    text = "\n".join(map(style.fit, lines)) + "\n"
    return text.replace("µs", "us") if ascii else text


def quantity_rows(comparison: Comparison) -> list[list[str]]:
    """Write each quantity: its name, in the first run, in the second, and what differs."""
    known = comparison.quantities
    return [[title, *_cells(known[name], write)] for name, title, write in _QUANTITIES if name in known]


def part_rows(comparison: Comparison) -> list[list[str]]:
    """Write the mean step in the same way, then the parts that matter."""
    parts = comparison.parts.values()
    whole = Difference(sum(part.first for part in parts), sum(part.second for part in parts))
    least = max(whole.first, 1e-9) * 0.0005
    shown = {name: part for name, part in comparison.parts.items() if max(part.first, part.second) >= least}
    own = [[TITLES[name], *_cells(part, time)] for name, part in shown.items()]
    return [["step time, mean", *_cells(whole, time)], *own]


def layer_rows(layers: Sequence[LayerChange]) -> list[list[str]]:
    """Write layers in the same way."""
    return [[layer.name, *_cells(Difference(layer.first or 0.0, layer.second or 0.0), time)] for layer in layers]


def _others(comparison: Comparison, changed: int) -> str:
    """Say how many layers are not listed, and why."""
    same, more = len(comparison.layers) - changed, max(changed - LAYERS, 0)
    words = [f"{more:,} more layers changed"] if more else []
    if same:
        words.append(f"{same:,} {plural(same, 'layer takes', 'layers take')} the same time, to within {CHANGED:.0%}")
    return f"{'; '.join(words)}." if words else ""


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


def _cells(difference: Difference, write: Any) -> list[str]:
    if write is percent:
        change = f"{difference.change * 100:+.1f} points" if abs(difference.change) >= 0.0005 else "-"
    else:
        share = difference.change / difference.first if difference.first else 0.0
        change = f"{share:+.{int(abs(share) < 10)}%}" if difference.first and abs(share) >= 0.0005 else "-"
        if write is time and abs(difference.change) >= 0.05:
            change = f"{signed_time(difference.change)}" + (f" ({change})" if difference.first else "")
    shown = [write(value) if value or write is not time else "-" for value in (difference.first, difference.second)]
    return [*shown, change]
