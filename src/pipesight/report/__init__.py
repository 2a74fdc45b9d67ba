"""Reading runs, and saying what happened in them. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily

if TYPE_CHECKING:
    from pipesight.analysis.analyse import analyse
    from pipesight.analysis.report import Report
    from pipesight.runs.reading.run import NotARunError, Run, open_run
    from pipesight.view.page import write_page
    from pipesight.view.report_json import as_json
    from pipesight.view.text_report import render

__all__ = ["NotARunError", "Report", "Run", "analyse", "as_json", "open_run", "render", "write_page"]

_HOMES = {
    "NotARunError": "pipesight.runs.reading.run",
    "Report": "pipesight.analysis.report",
    "Run": "pipesight.runs.reading.run",
    "analyse": "pipesight.analysis.analyse",
    "as_json": "pipesight.view.report_json",
    "open_run": "pipesight.runs.reading.run",
    "render": "pipesight.view.text_report",
    "write_page": "pipesight.view.page",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
