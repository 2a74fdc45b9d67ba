"""A report for machines: plain values, as ``report.schema.json`` describes them, times in microseconds, shares of 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipesight._version import __version__
from pipesight.analysis.critical_path import CriticalPath
from pipesight.analysis.layer_times import LayerReport
from pipesight.analysis.memory import MemoryReport
from pipesight.analysis.overall import Overall
from pipesight.analysis.pipeline_report import PipelineReport
from pipesight.analysis.program_report import ProgramReport
from pipesight.analysis.program_time import OWN, part_title
from pipesight.analysis.report import Report
from pipesight.analysis.step_times import PARTS, StepTimes, Summary
from pipesight.runs.reading.event_tables import Column

__all__ = ["FORMAT", "FORMAT_VERSION", "as_json"]

FORMAT, FORMAT_VERSION = "pipesight-report", 1

_FACTS = ("command", "host", "started", "ended", "outcome", "python", "torch", "cuda", "world_size")


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as what `json.dumps` takes; there is no NaN and no infinity in it.

    Example::

        >>> json.dumps(as_json(report), allow_nan=False)
    """
    result = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "pipesight": __version__,
        "run": {
            "path": report.path,
            **{name: _plain(report.description.get(name)) for name in _FACTS},
            "events": report.events,
            "attempt": report.attempt,
            "attempts": list(report.attempts),
            "ranks": list(report.ranks),
        },
        "remarks": [asdict(remark) for remark in report.remarks],
        "verdict": asdict(report.verdict),
        "overall": None if report.overall is None else _overall(report.overall),
        "left_out": {"warm_up": list(report.left.warm_up), "incomplete": report.left.incomplete},
        "evaluations": report.evaluations,
        "pipelines": [_pipeline(pipeline) for pipeline in report.pipelines],
        "steps": _steps(report.steps, report.counted),
        "layers": [_layer(layer) for layer in report.layers],
        "stragglers": [asdict(straggler) for straggler in report.stragglers],
        "links": [asdict(link) for link in report.links],
        "held": [asdict(held) for held in report.held],
        "collectives": [asdict(collective) for collective in report.collectives],
        "what_if": None if report.what_if is None else asdict(report.what_if),
        "nonfinite": None if report.nonfinite is None else asdict(report.nonfinite),
        "gpus": [asdict(gpu) for gpu in report.gpus],
        "logged": None if report.logged is None else asdict(report.logged),
        "profiled": [asdict(steps) for steps in report.profiled],
        "names": [asdict(name) for name in report.names],
        "program": None if report.program is None else _program(report.program),
        "lead": None if report.lead is None else asdict(report.lead),
        "own_spans": [asdict(span) for span in report.own_spans],
        "own_times": [asdict(own) for own in report.own_times],
        "curves": [asdict(curve) for curve in report.curves],
        "moments": [asdict(moment) for moment in report.moments],
        "memory": None if report.memory is None else _memory(report.memory),
        "critical_path": None if report.critical_path is None else _path(report.critical_path),
    }
    plain = _plain(result)
    assert isinstance(plain, dict)
    return plain


def _path(path: CriticalPath) -> dict[str, Any]:
    return {
        "step": path.step,
        "begin": path.begin,
        "follows": path.follows,
        "time": path.parts[-1].end if path.parts else 0.0,
        "totals": path.totals(),
        "parts": [asdict(part) for part in path.parts],
    }


def _memory(memory: MemoryReport) -> dict[str, Any]:
    return {
        "steps": list(memory.steps),
        "partitions": [asdict(entry) for entry in memory.partitions],
        "devices": [asdict(entry) for entry in memory.devices],
        "layers": [asdict(layer) for layer in memory.layers],
    }


def _program(program: ProgramReport) -> dict[str, Any]:
    total = max(sum(program.parts.values()), 1e-9)
    steps = program.steps
    columns = (steps.rank, steps.step, steps.begin, steps.period, steps.samples, program.counted)
    names = ("rank", "step", "begin", "time", "samples", "counted")
    rows = zip(*(column.tolist() for column in columns), steps.parts.T.tolist(), strict=True)
    return {
        "trains": program.trains,
        "ranks": program.ranks,
        "count": program.count,
        "time": asdict(program.time),
        "elapsed": program.elapsed,
        "steps_per_second": program.count / program.elapsed * 1e6,
        "samples_per_second": program.samples_per_second,
        "parts": [
            {"name": part_title(part), "own": part.startswith(OWN), "time": spent, "share": spent / total}
            for part, spent in program.parts.items()
        ],
        "steps": [
            {**dict(zip(names, row, strict=True)), "parts": dict(zip(map(part_title, steps.names), own, strict=True))}
            for *row, own in rows
        ],
        "modules": [{**asdict(module), "total": module.total} for module in program.modules.modules],
        "module_steps": program.modules.steps,
        "evaluations": program.evaluations,
    }


def _overall(overall: Overall) -> dict[str, Any]:
    total = max(sum(overall.parts.values()), 1e-9)
    return {
        "steps": overall.steps,
        "replicas": overall.replicas,
        "time": asdict(overall.time),
        "elapsed": overall.elapsed,
        "steps_per_second": overall.steps_per_second,
        "samples_per_second": overall.samples_per_second,
        "microbatches_per_second": overall.microbatches_per_second,
        "bubble": overall.bubble,
        "bubbles": asdict(overall.bubbles),
        "bound": overall.bound,
        "recompute": overall.recompute,
        "turnaround": overall.turnaround,
        "parts": {name: _part(time, total, overall.spreads[name]) for name, time in overall.parts.items()},
    }


def _part(time: float, total: float, spread: Summary) -> dict[str, float]:
    return {"time": time, "share": time / total, "low": spread.low, "high": spread.high}


def _pipeline(pipeline: PipelineReport) -> dict[str, Any]:
    facts = pipeline.facts
    return {
        "schedule": facts.schedule,
        "partitions": pipeline.partitions,
        "chunks": pipeline.chunks,
        "balance": None if facts.balance is None else list(facts.balance),
        "checkpoint": facts.checkpoint,
        "batch_size": facts.batch_size,
        "devices": pipeline.devices,
        "device_idle": pipeline.device_idle,
        "workers": pipeline.workers,
        "replicas": pipeline.replicas,
        "minibatches": pipeline.minibatches,
        "window": asdict(pipeline.window),
        "bubble": pipeline.bubble,
        "bubbles": asdict(pipeline.bubbles),
        "bound": pipeline.bound,
        "textbook": pipeline.textbook,
        "rows": [{**asdict(row), "ranks": list(row.ranks)} for row in pipeline.rows],
    }


def _steps(steps: StepTimes, counted: Column) -> list[dict[str, Any]]:
    columns = {
        "replica": steps.replica,
        "step": steps.step,
        "begin": steps.begin,
        "time": steps.period,
        "window": steps.window,
        "minibatches": steps.minibatches,
        "bubble": steps.bubble,
        "bound": steps.bound,
        "counted": counted,
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    parts = steps.parts.T.tolist()
    return [
        {**dict(zip(columns, row, strict=True)), "parts": dict(zip(PARTS, own, strict=True))}
        for row, own in zip(rows, parts, strict=True)
    ]


def _layer(layer: LayerReport) -> dict[str, Any]:
    return {**asdict(layer), "runs": dict(zip(("forward", "recompute", "backward"), layer.runs, strict=True))}


def _plain(value: object) -> Any:
    """Make lists of tuples, and null of what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
