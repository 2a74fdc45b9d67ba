"""The payload of the page of a run: everything that the page draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipesight.analysis.critical_path import critical_paths
from pipesight.analysis.curves import Curve
from pipesight.analysis.described_pipelines import hosts_of
from pipesight.analysis.report import Report
from pipesight.runs.reading.event_tables import LayerRuns
from pipesight.runs.reading.run import Run
from pipesight.runs.reading.trace_reader import find_traces
from pipesight.view.payload.log_lines import logs_of
from pipesight.view.payload.lost_time import losses_of, losses_of_step
from pipesight.view.payload.memory_curves import last_counted, memory_of
from pipesight.view.payload.nonfinite_marks import marks_of_step
from pipesight.view.payload.program_payload import program_payload
from pipesight.view.payload.rank_traffic import traffic_of
from pipesight.view.payload.run_summary import alarm_of, facts_of, figures_of, findings_of, title_of, verdict_of
from pipesight.view.payload.size_limits import LIMITS, Limits
from pipesight.view.payload.span_rows import curve_columns
from pipesight.view.payload.statistic_tables import Marks, statistics_of
from pipesight.view.payload.step_timelines import StepTimelines
from pipesight.view.payload.worker_map import what_if_of

__all__ = ["page_payload"]

VERSION = 1


def page_payload(
    run: Run, report: Report, *, limits: Limits = LIMITS, steps: range | None = None, first: int | None = None
) -> dict[str, Any]:
    """Return what the page draws of a run, as JSON has it.

    The report is of the same ``steps``, if not of all. The page opens at step ``first``; by default, it is the one that
    matters: the first in which a tensor was not finite or, if there is none, a typical one.
    """
    if report.program is not None:
        payload = program_payload(run, report, report.program, limits=limits, steps=steps, first=first)
        return {**payload, "traces": _traces(run.path)}
    bad = None if report.nonfinite is None else report.nonfinite.iteration
    found = (report.minibatches, report.tasks, run.spans(), run.transfers())
    timelines = StepTimelines(
        *found,
        limits=limits,
        replicas=report.replicas,
        typical=report.typical,
        first=bad if first is None else first,
        also=last_counted(report.memory),
        only=steps,
        taking_turns=report.taking_turns,
        own=report.own,
        moments=report.moments,
    )
    names = [layer.name for layer in report.layers]
    lines = (line for line in run.statistics() if steps is None or line.get("iteration") in steps)
    statistics, marks = statistics_of(lines, most=limits.values, layers=names)
    shown, layered = _shown(run, report, timelines, marks, limits)
    numbers = [step["number"] for step in shown]
    said = (line for line in run.log_lines() if steps is None or line.step is None or line.step in steps)
    logs = logs_of(said, steps=numbers, begin=timelines.begin, most=limits.log_lines)
    return {
        "version": VERSION,
        "revision": 0,
        "live": False,
        "path": str(run.path),
        "title": title_of(run.path),
        "scope": None if steps is None else _scope(steps, timelines.numbers),
        "facts": facts_of(report),
        "alarm": alarm_of(report, timelines.lanes, numbers),
        "verdict": verdict_of(report),
        "findings": findings_of(report),
        "figures": figures_of(report),
        "losses": losses_of(report),
        "ranks": len({lane.rank for lane in timelines.all_lanes}),
        "replicas": len({lane.replica for lane in timelines.all_lanes}),
        "chunks": timelines.chunks,
        "lanes": _lanes(report, timelines),
        "programs": timelines.programs(),
        "levels": timelines.levels,
        "span_names": timelines.names.all,
        "layers": _layers(report),
        "steps": _steps(report, timelines, marks),
        "shown": shown,
        "start": numbers.index(timelines.start) if timelines.start in numbers else 0,
        "statistics": statistics,
        "curves": curve_columns((*_logged_times(report), *report.curves)),
        "memory": memory_of(report.memory, timelines.begins()),
        "logs": logs,
        "what_if": what_if_of(report.what_if),
        "traffic": traffic_of(report),
        "timers": _timers(report),
        "names": [[name.category, name.name, name.count, name.total] for name in report.names],
        "notes": _notes(timelines, shown, layered),
        "traces": _traces(run.path),
    }


def _timers(report: Report) -> list[list[Any]]:
    """Return the timers of a training log."""
    timers = report.logged.timers if report.logged is not None else ()
    return [[timer.name, timer.least, timer.most, timer.share, timer.count] for timer in timers]


def _logged_times(report: Report) -> tuple[Curve, ...]:
    """Return how long the iterations of a training log took, as a curve."""
    if report.logged is None:
        return ()
    return (Curve("iteration (ms)", report.logged.steps, tuple(time / 1000 for time in report.logged.times)),)


def _shown(
    run: Run, report: Report, timelines: StepTimelines, marks: Marks, limits: Limits
) -> tuple[list[dict[str, Any]], int]:
    """Return the steps, in order, and how many of them have their layers."""
    layers = {(layer.partition, layer.name): k for k, layer in enumerate(report.layers)}
    partitions = {layer.name: layer.partition for layer in reversed(report.layers)}
    bubbles = report.bubbles()
    paths, path_room = critical_paths(run, report, timelines.chosen), limits.blocks // 8
    runs = _layer_runs(run, report, timelines.chosen, limits.layer_runs) if layers else {}
    room = limits.layer_runs
    found, layered = [], 0
    for number in timelines.chosen:
        step = timelines.step(number)
        step["bubble"] = round(bubbles[number], 6) if number in bubbles else None
        step["losses"] = losses_of_step(report, number)
        step["path"] = None
        if number in paths and path_room >= len(paths[number].parts):
            path_room -= len(paths[number].parts)
            step["path"] = timelines.path(paths[number])
        step["nonfinite"] = marks_of_step(
            marks, number, lanes=timelines.lanes, partitions=partitions, tasks=step["tasks"]
        )
        step["layers"] = None
        if number in runs and room > 0:
            drawn = timelines.layers(number, runs[number], layers)
            room -= len(drawn["layer"])
            if room >= 0:
                step["layers"] = drawn
                layered += 1
        found.append(step)
    return sorted(found, key=lambda step: int(step["number"])), layered


def _layer_runs(run: Run, report: Report, steps: Sequence[int], most: int) -> dict[int, LayerRuns]:
    """Return the layers of the first of these steps, about as many as there is room for, from one query."""
    usual = sum(sum(layer.runs) for layer in report.layers) / max(1, len(report.steps.step))
    asked = steps[: int(most / max(1.0, usual)) + 1]
    found = run.layer_runs(*asked)
    order = np.argsort(found.step, kind="stable")
    first = np.searchsorted(found.step[order], asked, side="left")
    last = np.searchsorted(found.step[order], asked, side="right")
    return {step: found.where(order[a:b]) for step, a, b in zip(asked, first, last, strict=True)}


def _steps(report: Report, timelines: StepTimelines, marks: Marks) -> dict[str, Any]:
    """Return a row for every step, including those that are not shown."""
    bubbles = report.bubbles()
    return {
        "number": timelines.numbers,
        "time": timelines.times.tolist(),
        "bubble": [round(bubbles[n], 4) if n in bubbles else None for n in timelines.numbers],
        "nonfinite": sorted(marks.of_step),
    }


def _lanes(report: Report, timelines: StepTimelines) -> list[dict[str, Any]]:
    hosts = hosts_of(report.description)
    devices = {(row.partition, r): row.device for p in report.pipelines for row in p.rows for r in row.ranks}
    return [
        {
            "rank": lane.rank,
            "partition": lane.partition,
            "replica": lane.replica,
            "host": hosts.get(lane.rank),
            "takes_turns": lane.rank in report.taking_turns,
            "device": devices.get((lane.partition, lane.rank)),
            "layers": [k for k, layer in enumerate(report.layers) if layer.partition == lane.partition],
        }
        for lane in timelines.lanes
    ]


def _layers(report: Report) -> list[dict[str, Any]]:
    sizes = {
        (layer.partition, layer.name): layer.parameter_bytes
        for pipeline in report.pipelines
        for layer in pipeline.facts.layers
    }

    def mean(time: float, runs: int) -> float | None:
        return round(time, 1) if runs else None

    return [
        {
            "name": layer.name,
            "class": layer.type,
            "partition": layer.partition,
            "forward": mean(layer.forward, layer.runs[0]),
            "recompute": mean(layer.recompute, layer.runs[1]),
            "backward": mean(layer.backward, layer.runs[2]),
            "longest": layer.longest,
            "share": round(layer.share, 5),
            "parameter_bytes": sizes.get((layer.partition, layer.name)),
        }
        for layer in report.layers
    ]


def _notes(timelines: StepTimelines, shown: Sequence[Mapping[str, Any]], layered: int) -> list[str]:
    """Return notes on what is not shown for lack of room."""
    notes = []
    if len(shown) < len(timelines.numbers):
        notes.append(
            f"The timeline shows {len(shown):,} of {len(timelines.numbers):,} steps: the first, the last, the slowest, "
            "a typical one, and others evenly between them."
        )
    if 0 < layered < len(shown):
        notes.append(f"The layers of blocks are in the page for {layered:,} of these steps.")
    if len(timelines.lanes) < len(timelines.all_lanes):
        notes.append(f"The timeline shows {len(timelines.lanes):,} of {len(timelines.all_lanes):,} lanes.")
    return notes


def _scope(steps: range, numbers: Sequence[int]) -> str:
    """Say which of the requested steps the page shows."""
    first, last = (numbers[0], numbers[-1]) if numbers else (steps.start, steps.stop - 1)
    return f"step {first} only" if first == last else f"steps {first} to {last}"


def _traces(path: Path) -> list[str]:
    """Return the files that Perfetto opens, as seen from the page."""
    try:
        found = find_traces(path)
    except FileNotFoundError:
        return []
    folder = path if path.is_dir() else path.parent
    return [str(file.relative_to(folder)) for file in found]
