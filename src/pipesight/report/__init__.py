"""Reading runs, and saying what happened in them. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily

if TYPE_CHECKING:
    from pipesight.report.analysis.analysing import Report, analyse
    from pipesight.report.html import write_page
    from pipesight.report.json_report import as_json
    from pipesight.report.reading.run import NotARunError, Run, open_run
    from pipesight.report.terminal import render

__all__ = ["NotARunError", "Report", "Run", "analyse", "as_json", "open_run", "render", "write_page"]

_HOMES = {
    "NotARunError": "pipesight.report.reading.run",
    "Report": "pipesight.report.analysis.analysing",
    "Run": "pipesight.report.reading.run",
    "analyse": "pipesight.report.analysis.analysing",
    "as_json": "pipesight.report.json_report",
    "open_run": "pipesight.report.reading.run",
    "render": "pipesight.report.terminal",
    "write_page": "pipesight.report.html",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
