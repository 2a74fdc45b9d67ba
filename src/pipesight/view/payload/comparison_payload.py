"""The payload of a page that compares two or more runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipesight.analysis.compared_curves import STEP_TIME, ComparedCurve, compared_curves
from pipesight.analysis.comparison import Comparison, title_of
from pipesight.analysis.program_time import OWN
from pipesight.analysis.report import Report
from pipesight.view.comparison_text import (
    MARKS,
    changed_layers,
    compared_runs,
    layer_rows,
    layers_of,
    memory_rows,
    part_rows,
    quantity_rows,
    settings_text,
    text_of,
)
from pipesight.view.finding_sentences import nonfinite_in
from pipesight.view.payload.lost_time import MEANINGS
from pipesight.view.payload.run_summary import facts_of, findings_of
from pipesight.view.payload.run_summary import title_of as title_of_run

__all__ = ["comparison_payload"]

VERSION = 2
LAYERS = 500
"""How many there are at most."""
CURVES, POINTS = 32, 1_000
"""How many curves there are at most, and steps of each."""


def comparison_payload(comparison: Comparison, *more: Comparison) -> dict[str, Any]:
    """Return what the page draws of a comparison; numbers in tables are as the terminal writes them."""
    reports, pairs = compared_runs(comparison, *more), (comparison, *more)
    titles = [title_of_run(Path(report.path)) for report in reports]
    names = dict.fromkeys(name for one in pairs for name in one.parts)
    curves = compared_curves(reports)[:CURVES]
    return {
        "version": VERSION,
        "title": f"{', '.join(titles[:-1])} and {titles[-1]}",
        "marks": list(MARKS[: len(reports)]),
        "text": [text_of(one, mark) if more else one.text for one, mark in zip(pairs, MARKS[1:], strict=False)],
        "settings": [settings_text(one) for one in pairs],
        "runs": [_run(report, title) for report, title in zip(reports, titles, strict=True)],
        "quantities": [*quantity_rows(*pairs), *memory_rows(*pairs)],
        "parts": {
            "keys": [_part(name) for name in names],
            "times": [_times(name, pairs) for name in names],
            "rows": part_rows(*pairs),
        },
        "curves": [{**_thinned(curve), "time": curve.name == STEP_TIME} for curve in curves],
        "layers": {
            "rows": layer_rows(*pairs, most=LAYERS),
            "changed": len(changed_layers(*pairs)),
            "all": len(layers_of(*pairs)),
        },
    }


def _times(name: str, pairs: Sequence[Comparison]) -> list[float]:
    first = max((pair.parts[name].first for pair in pairs if name in pair.parts), default=0.0)
    return [first, *(pair.parts[name].second if name in pair.parts else 0.0 for pair in pairs)]


def _part(name: str) -> dict[str, str]:
    """A part of a step; what is computed has the colour of a backward here."""
    key = "backward" if name == "computing" else "own" if name.startswith(OWN) else name
    return {"key": key, "name": title_of(name), "text": MEANINGS.get(name, "")}


def _thinned(curve: ComparedCurve) -> dict[str, Any]:
    """Return a curve with at most so many steps, evenly spread, and the last."""
    every = -(-len(curve.steps) // POINTS)
    kept = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1})
    values = [[_plain(own[k]) for k in kept] for own in curve.values]
    return {"name": curve.name, "steps": [curve.steps[k] for k in kept], "values": values}


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _run(report: Report, title: str) -> dict[str, Any]:
    alarm = nonfinite_in(report)
    return {
        "title": title,
        "path": report.path,
        "alarm": None if alarm is None else alarm.text,
        "verdict": report.verdict.text,
        "findings": findings_of(report),
        "facts": facts_of(report),
    }
