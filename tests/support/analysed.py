"""Synthetic runs, analysed: helpers for the tests of findings."""

from __future__ import annotations

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.report import Report
from pipesight.runs.reading.run import open_run
from support.synthetic import Made

EVEN = {"forward": 100, "recompute": 100, "backward": 200}


def even(phase: str, i: int, j: int) -> int:
    return EVEN[phase]


def analysed(made: Made, **options) -> Report:
    with open_run(made.write()) as run:
        return analyse(run, **options)


def parts(report: Report) -> dict[str, float]:
    """Return the parts of the mean step that there are."""
    assert report.overall is not None
    return {name: time for name, time in report.overall.parts.items() if time}


def add_up(report: Report) -> None:
    """Check that everything that should add up does."""
    assert report.steps.parts.sum(axis=0) == pytest.approx(report.steps.period, rel=1e-9)
    assert (report.steps.parts >= 0).all()
    if report.overall is not None:
        assert sum(report.overall.parts.values()) == pytest.approx(report.overall.time.mean)
    for pipeline in report.pipelines:
        for row in pipeline.rows:
            assert row.busy + sum(row.losses.values()) == pytest.approx(pipeline.window.mean)
            assert row.bubble == pytest.approx(1 - row.busy / pipeline.window.mean)
