"""Curves of several runs over the same steps: how long each step took, the loss, and every other counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.curves import Curve
from pipesight.analysis.report import Report

__all__ = ["STEP_TIME", "ComparedCurve", "compared_curves"]

STEP_TIME = "step time"
"""The curve of how long each step took, in microseconds; it comes first."""


@dataclass(frozen=True, slots=True)
class ComparedCurve:
    """One curve in several runs."""

    name: str
    """As in each run."""
    steps: tuple[int, ...]
    """Those that any of the runs has."""
    values: tuple[tuple[float | None, ...], ...]
    """Of each run, one for each step; ``None`` where it has none."""


def compared_curves(reports: Sequence[Report]) -> tuple[ComparedCurve, ...]:
    """Put the curves of runs side by side: those of all runs first, and as the first run orders them."""
    curves = [{curve.name: curve for curve in (*_step_times(report), *report.curves)} for report in reports]
    names = dict.fromkeys(name for own in curves for name in own)
    ordered = sorted(names, key=lambda name: not all(name in own for own in curves))
    return tuple(_joined(name, [own.get(name) for own in curves]) for name in ordered)


def _step_times(report: Report) -> tuple[Curve, ...]:
    if len(report.steps):
        steps = report.steps.over_replicas()
        numbers, times = steps.step, steps.period
    elif report.program is not None:
        numbers, times = report.program.steps.by_step()
    elif report.logged is not None:
        return (Curve(STEP_TIME, report.logged.steps, report.logged.times),)
    else:
        return ()
    order = np.argsort(numbers, kind="stable")
    return (Curve(STEP_TIME, tuple(numbers[order].tolist()), tuple(times[order].astype(float).tolist())),)


def _joined(name: str, curves: Sequence[Curve | None]) -> ComparedCurve:
    known = [{} if curve is None else dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = tuple(sorted({step for own in known for step in own}))
    return ComparedCurve(name, steps, tuple(tuple(own.get(step) for step in steps) for own in known))
