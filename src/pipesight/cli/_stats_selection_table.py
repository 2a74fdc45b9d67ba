"""The output of `pipesight stats check`: for each section its layers, and a table of what is logged."""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from pipesight._plurals import count_of
from pipesight.stats.config import Config, FeatureConfig, Section
from pipesight.stats.config.rules import RuleTable, StatisticRequest, TensorRule
from pipesight.stats.config.selection import spans
from pipesight.stats.unmatched_names import missing_layers, unknown_tensors

__all__ = ["fold", "print_sections"]

INDENT, GAP = 2, 2
UNWRAPPED = 10_000


def print_sections(config: Config, layers: Sequence[str] | None, selected: Mapping[str, Section]) -> None:
    """Print the sections of a configuration.

    ``layers`` are those of the model, if there is one.
    """
    console = _console()
    with console.capture() as capture:
        for section in config.sections:
            mine = None if layers is None else [name for name, owner in selected.items() if owner is section]
            _print_section(console, section, mine, layers or ())
        if layers is not None:
            rest = len(layers) - len(selected)
            console.print(f"{len(selected)} of {count_of(len(layers), 'layer')} selected, {rest} by no section")
        else:
            console.print("to see which layers are selected, add --model module:factory")
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _console() -> Console:
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        console = Console(markup=False, highlight=False, emoji=False, width=UNWRAPPED)
    return console


def _print_section(console: Console, section: Section, mine: list[str] | None, layers: Sequence[str]) -> None:
    line = f" (line {section.line})" if section.line else ""
    if not section.enabled:
        console.print(f"{section.name}{line}: disabled", style="dim")
        console.print()
        return
    head = f"{section.name}{line}"
    if mine is not None:
        head += f": {count_of(len(mine), 'layer')}"
    console.print(head, style="bold")
    _indented(console, f"selects {section.selection}")
    for key in section.selection.ignored:
        _indented(console, f"note: {key} is not used, as another selector decides", style="yellow")
    if mine is not None:
        for name, count in fold(mine):
            _indented(console, f"layer {name}" if count == 1 else f"layer {name} ({count})")
        if not mine:
            _indented(console, "warning: selects no layer of this model", style="yellow")
        for line in (*missing_layers(section, layers), *unknown_tensors(section)):
            _indented(console, f"warning: {line}", style="yellow")
    if not any(feature.enabled for feature in section.features):
        _indented(console, "warning: all its features are disabled", style="yellow")
    console.print()
    console.print(Padding(_table(section, console), (0, 0, 0, INDENT)))
    console.print()


def _indented(console: Console, text: str, style: str | None = None) -> None:
    console.print(Padding(text, (0, 0, 0, INDENT)), style=style)


def _table(section: Section, console: Console) -> Table:
    rows = [row for feature in section.features for row in _rows(feature)]
    titles = ["feature", "tensors", "statistics", "steps"] + ["NaN, Inf"] * any(row[-1] for row in rows)
    columns = [[title, *(row[i] for row in rows)] for i, title in enumerate(titles)]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    room = console.width - INDENT - GAP * (len(titles) - 1)
    for title, width in zip(titles, _widths(columns, room), strict=True):
        table.add_column(title, overflow="fold", width=width)
    for row in rows:
        table.add_row(*row[: len(titles)])
    return table


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return widths that fit the room: the widest columns give way, but break words only when all else is narrow."""
    widths = [max(map(len, column)) for column in columns]
    words = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    while sum(widths) > room and max(widths) > 1:
        able = [i for i, width in enumerate(widths) if width > words[i]] or range(len(widths))
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _rows(feature: FeatureConfig) -> Iterable[tuple[str, str, str, str, str]]:
    name = feature.name if feature.namespace == "base" else f"{feature.namespace} {feature.name}"
    if not feature.enabled:
        yield name, "disabled", "", "", ""
        return
    tables = [(f"{gemm}: ", table) for gemm, table in feature.gemms.items()] or [("", feature.table)]
    for gemm, table in tables:
        for tensors, rule in _alike(table):
            stats = ", ".join(_statistic(request) for request in rule.stats)
            yield name, gemm + ", ".join(tensors), stats, str(rule.steps), rule.on_nonfinite or ""


def _statistic(request: StatisticRequest) -> str:
    options = " ".join(f"{key} {value}" for key, value in request.options)
    return f"{request.name} ({options})" if options else request.name


def _alike(table: RuleTable) -> list[tuple[list[str], TensorRule]]:
    """Put tensors that are logged alike together."""
    rules = [*table.tensors.items()]
    if table.otherwise is not None:
        rules.append(("all others" if rules else "all", table.otherwise))
    groups: list[tuple[list[str], TensorRule]] = []
    for tensor, rule in rules:
        for tensors, first in groups:
            if (first.stats, first.steps, first.on_nonfinite) == (rule.stats, rule.steps, rule.on_nonfinite):
                tensors.append(tensor)
                break
        else:
            groups.append(([tensor], rule))
    return groups


def fold(names: Iterable[str]) -> list[tuple[str, int]]:
    """Write names that differ in their numbers as one, and count them.

    Example::

        >>> fold(["layers.0.fc1", "layers.1.fc1", "layers.2.fc1", "head"])
        [('layers.{0-2}.fc1', 3), ('head', 1)]
    """
    groups: dict[tuple[str | None, ...], list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        form = tuple(None if _is_number(part) else part for part in parts)
        groups[form].append(tuple(int(part) for part in parts if _is_number(part)))
    folded = []
    for form, numbers in groups.items():
        places = [sorted({*place}) for place in zip(*numbers, strict=True)]
        if {*itertools.product(*places)} == {*numbers}:
            folded.append((_write(form, places), len(numbers)))
        else:
            by_head: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for *head, last in numbers:
                by_head[tuple(head)].append(last)
            for head_numbers, lasts in by_head.items():
                folded.append((_write(form, [*([number] for number in head_numbers), sorted(lasts)]), len(lasts)))
    return folded


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and (part == "0" or not part.startswith("0"))


def _write(form: tuple[str | None, ...], places: Sequence[Sequence[int]]) -> str:
    numbers = iter(places)
    return ".".join(_spans(next(numbers)) if part is None else part for part in form)


def _spans(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else "{" + ",".join(spans(numbers)) + "}"
