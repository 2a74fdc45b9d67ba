"""The payload of a page that compares two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipesight.analysis.comparison import Comparison
from pipesight.analysis.report import Report
from pipesight.analysis.verdict import TITLES
from pipesight.view.comparison_text import layer_rows, part_rows, quantity_rows, settings_text
from pipesight.view.finding_sentences import nonfinite_in
from pipesight.view.payload.lost_time import MEANINGS
from pipesight.view.payload.run_summary import facts_of, findings_of, title_of

__all__ = ["comparison_payload"]

VERSION = 1
LAYERS = 500
"""How many there are at most."""


def comparison_payload(comparison: Comparison) -> dict[str, Any]:
    """Return what the page draws of a comparison; numbers in tables are as the terminal writes them."""
    changed = [layer for layer in comparison.layers if layer.changed]
    titles = [title_of(Path(report.path)) for report in (comparison.first, comparison.second)]
    return {
        "version": VERSION,
        "title": " and ".join(titles),
        "text": comparison.text,
        "settings": settings_text(comparison),
        "runs": [_run(report, title) for report, title in zip(_reports(comparison), titles, strict=True)],
        "quantities": quantity_rows(comparison),
        "parts": {
            "keys": [_part(name) for name in comparison.parts],
            "times": [[part.first, part.second] for part in comparison.parts.values()],
            "rows": part_rows(comparison),
        },
        "layers": {
            "rows": layer_rows(changed[:LAYERS]),
            "changed": len(changed),
            "all": len(comparison.layers),
        },
    }


def _reports(comparison: Comparison) -> tuple[Report, Report]:
    return comparison.first, comparison.second


def _part(name: str) -> dict[str, str]:
    """A part of a step; what is computed has the colour of a backward here."""
    key = "backward" if name == "computing" else name
    return {"key": key, "name": TITLES[name], "text": MEANINGS.get(name, "Partitions compute.")}


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
