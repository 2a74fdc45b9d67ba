"""Two runs side by side: what differs, and which loss explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipesight._plurals import plural
from pipesight.analysis.changed_layers import CHANGED, LayerChange, layer_changes
from pipesight.analysis.formatting import percent, time
from pipesight.analysis.report import Report
from pipesight.analysis.same_layers import same_layers
from pipesight.analysis.verdict import TITLES
from pipesight.view.report_json import as_json
from pipesight.view.text_layout import Style, columns, shown_width

__all__ = [
    "Comparison",
    "Difference",
    "compare",
    "comparison_as_json",
    "layer_rows",
    "part_rows",
    "quantity_rows",
    "render_comparison",
    "settings_text",
]

ALIKE = 0.01
"""Of the first run's step, what two runs may differ and still be called alike."""
LAYERS = 8
"""How many layers that changed are listed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A quantity in both runs."""

    first: float
    second: float

    @property
    def change(self) -> float:
        """The second less the first."""
        return self.second - self.first


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What differs between two runs. Times are microseconds: of steps the median, of their parts the mean."""

    first: Report
    second: Report
    text: str
    quantities: Mapping[str, Difference]
    parts: Mapping[str, Difference]
    layers: Sequence[LayerChange]
    """Of both runs, those that differ most first."""
    settings: Mapping[str, tuple[Any, Any]]
    """Those that differ, as far as both runs tell: by name, in the first run and in the second."""


def compare(first: Report, second: Report) -> Comparison:
    """Compare two runs, the second with the first.

    Raises:
        ValueError: One of them has no complete step.
    """
    for report in (first, second):
        if report.overall is None:
            raise ValueError(f"{report.path!r} has no complete step to compare")
    one, other = first.overall, second.overall
    assert one is not None
    assert other is not None
    quantities = {
        "step_time": Difference(one.time.median, other.time.median),
        "steps_per_second": Difference(one.steps_per_second, other.steps_per_second),
        "microbatches_per_second": Difference(one.microbatches_per_second, other.microbatches_per_second),
        "bubble": Difference(one.bubble, other.bubble),
        "bound": Difference(one.bound, other.bound),
        "recompute": Difference(one.recompute, other.recompute),
    }
    if one.samples_per_second is not None and other.samples_per_second is not None:
        quantities["samples_per_second"] = Difference(one.samples_per_second, other.samples_per_second)
    parts = {name: Difference(one.parts[name], other.parts[name]) for name in one.parts}
    text = _sentence(one.time.median, other.time.median, parts)
    if (same := same_layers(first, second)) is not None:
        quantities["same_layers"] = Difference(same.first, same.second)
        if (machine := same.sentence()) is not None:
            text = f"{text} {machine}"
    return Comparison(first, second, text, quantities, parts, layer_changes(first, second), _settings(first, second))


def _settings(first: Report, second: Report) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the pipelines that most mini-batches of each run went through."""
    one, other = _settings_of(first), _settings_of(second)
    known = [name for name in one if one[name] is not None and other.get(name) is not None]
    return {name: (one[name], other[name]) for name in known if one[name] != other[name]}


def _settings_of(report: Report) -> dict[str, Any]:
    if not report.pipelines:
        return {}
    pipeline = max(report.pipelines, key=lambda pipeline: pipeline.minibatches)
    facts = pipeline.facts
    devices = facts.devices and list(facts.devices)
    if devices and len({*devices}) == 1:  # as many as there are partitions, which is told
        del devices[1:]
    return {
        "ranks": len(report.ranks),
        "replicas": pipeline.replicas,
        "partitions": pipeline.partitions,
        "balance": facts.balance and list(facts.balance),
        "devices": devices,
        "chunks": pipeline.chunks,
        "schedule": facts.schedule,
        "checkpoint": facts.checkpoint,
        "batch": facts.batch_size,
    }


def settings_text(comparison: Comparison) -> str:
    """Say which settings differ."""
    differ = [f"{name} {_plain(one)} -> {_plain(other)}" for name, (one, other) in comparison.settings.items()]
    return f"Different settings: {', '.join(differ)}" if differ else "The recorded settings are the same"


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _sentence(before: float, after: float, parts: Mapping[str, Difference]) -> str:
    change = after - before
    if abs(change) < ALIKE * before:
        largest = max(parts, key=lambda name: abs(parts[name].change))
        text = f"The median step takes the same time in both, to within {ALIKE:.0%}"
        if abs(parts[largest].change) < ALIKE * before:
            return f"{text}, spent in the same way."
        differs = f"{TITLES[largest]} ({_signed(parts[largest].change)})"
        return f"{text}; the largest difference in the mean step is {differs}."
    text = f"The second run takes {abs(change) / before:.1%} {'more' if change > 0 else 'less'} time per step: "
    text += f"{_signed(change)} in the median step."
    # Parts are those of the mean step, in which a few steps that took long may weigh much.
    mean = sum(part.change for part in parts.values())
    if abs(mean - change) <= 0.25 * abs(change):
        return f"{text} In the mean step, most of that is {_causes(change, parts)}."
    if abs(mean) < ALIKE * before:
        return f"{text} The mean step takes the same time: some steps took much longer than others."
    return f"{text} The mean step changed by {_signed(mean)}, and most of that is {_causes(mean, parts)}."


def _causes(change: float, parts: Mapping[str, Difference]) -> str:
    """Name what went the same way as the whole, the largest first, until most of it is explained."""
    causes = sorted((n for n in parts if parts[n].change * change > 0), key=lambda n: -abs(parts[n].change))
    named, sum_so_far = [], 0.0
    for name in causes[:3]:
        if abs(sum_so_far) >= 0.8 * abs(change) or abs(parts[name].change) < 0.05 * abs(change):
            break
        named.append(f"{TITLES[name]} ({_signed(parts[name].change)})")
        sum_so_far += parts[name].change
    if not named:
        return "spread over all parts"
    return ", ".join(named[:-1]) + (" and " if len(named) > 1 else "") + named[-1]


def _signed(change: float) -> str:
    return f"{'+' if change > 0 else '-'}{time(abs(change))}"


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
    """Write the mean step in the same way, then its parts, those that matter."""
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


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_QUANTITIES = (
    ("step_time", "step time, median", time),
    ("steps_per_second", "steps/s", _rate),
    ("samples_per_second", "samples/s", _rate),
    ("microbatches_per_second", "micro-batches/s", _rate),
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
            change = f"{_signed(difference.change)}" + (f" ({change})" if difference.first else "")
    shown = [write(value) if value or write is not time else "-" for value in (difference.first, difference.second)]
    return [*shown, change]
