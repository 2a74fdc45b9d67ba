"""Where the time went, for the page: the parts of a step, what they mean, and how much of each there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.own_spans import OwnTime
from pipesight.analysis.report import Report
from pipesight.analysis.step_times import OUTSIDE, PARTS
from pipesight.analysis.verdict import TITLES
from pipesight.runs.reading.event_codes import PHASES

__all__ = ["MEANINGS", "losses_of", "losses_of_step"]

MEANINGS = {
    "forward": "Computing the forward pass.",
    "recompute": "Recomputing activations that checkpointing did not keep.",
    "backward": "Computing gradients.",
    "weight": "Computing weight gradients, in schedules that separate them.",
    "fill_and_drain": "The schedule's own: later partitions wait for the first micro-batch, earlier ones for the last. "
    "More micro-batches make it smaller.",
    "sharing": "Partitions on one device take turns, or slow each other down.",
    "imbalance": "Partitions take unequal time, so the others wait for the slowest. Rebalance.",
    "jitter": "Tasks of the same kind vary in time, and others wait for the slow ones.",
    "transfers": "Tensors are in transit from another device.",
    "host_gaps": "None of the above: thread handover, Python, kernel launches.",
    "evaluation": "Forward passes without a backward.",
    "data_loading": "The main thread waits for the next batch.",
    "optimizer": "The optimizer's step.",
    "checkpoints": "Saving and loading checkpoints.",
    "communication": "The main thread waits for other ranks.",
    "between_steps": "Everything else the program does between steps.",
}

KEYS = (*PHASES, *LOSSES, *OUTSIDE)


def losses_of(report: Report) -> dict[str, Any]:
    """Return the parts, and their times in the mean step, over all partitions and for each."""
    parts = [{"key": key, "name": TITLES.get(key, key), "text": MEANINGS[key], "kind": _kind(key)} for key in KEYS]
    if report.overall is None:
        return {"parts": parts, "steps": 0, "run": {"all": [0] * len(KEYS), "lanes": []}}
    times = report.overall.parts
    shares = _shares(report)
    minibatches = float(report.steps.minibatches[report.counted].mean())
    lanes: list[dict[str, Any]] = []
    for pipeline in report.pipelines:
        for row in pipeline.rows:
            # Tasks take longer while partitions share processors: that time is lost, and counts there alone.
            inside = {**{key: row.busy * share for key, share in _normal(row.phases).items()}, **row.losses}
            own = [inside.get(key, 0.0) * minibatches if key not in OUTSIDE else times.get(key, 0.0) for key in KEYS]
            lanes.append({"partition": row.partition, "times": _whole(own)})
    spans = report.own_times
    parts += [{"key": "own", "name": span.name, "text": _own_text(span), "kind": _kind(span.part)} for span in spans]
    shown = {part: times[part] - sum(span.time for span in spans if span.part == part) for part in times}
    for lane in lanes:
        lane["times"] += [0] * len(spans)
    everything = [times["computing"] * shares[key] if key in PHASES else shown.get(key, 0.0) for key in KEYS]
    run = {"all": _whole([*everything, *(span.time for span in spans)]), "lanes": lanes}
    return {"parts": parts, "steps": report.overall.steps, "run": run}


def _own_text(span: OwnTime) -> str:
    where = "between forward and backward" if span.part == "host_gaps" else "between steps"
    return f"A span of yours, {where}."


def losses_of_step(report: Report, number: int) -> list[int] | None:
    """Return the times of the parts in one step, or ``None`` if it is not complete."""
    rows = np.flatnonzero(report.steps.step == number)
    if not len(rows):
        return None
    times = dict(zip(PARTS, report.steps.parts[:, rows].mean(axis=1).tolist(), strict=True))
    shares = _shares_of(report.tasks.where(report.tasks.step == number))
    return _whole([times["computing"] * shares[key] if key in PHASES else times.get(key, 0.0) for key in KEYS])


def _shares(report: Report) -> Mapping[str, float]:
    """Return the share of each phase in computing."""
    sums = {phase: sum(row.phases.get(phase, 0.0) for p in report.pipelines for row in p.rows) for phase in PHASES}
    return _normal(sums)


def _shares_of(tasks: Any) -> Mapping[str, float]:
    times = tasks.end - tasks.begin
    return _normal({phase: float(times[tasks.phase == number].sum()) for number, phase in enumerate(PHASES)})


def _normal(sums: Mapping[str, float]) -> Mapping[str, float]:
    whole = sum(sums.values())
    return {key: value / whole if whole else 0.0 for key, value in sums.items()}


def _kind(key: str) -> str:
    return "busy" if key in PHASES else "loss" if key in LOSSES else "outside"


def _whole(times: list[float]) -> list[int]:
    return [round(time) for time in times]
