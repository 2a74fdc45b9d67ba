"""The payload of the page of a program without a pipeline: the spans of its steps, nested, instead of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipesight.analysis.program_report import ProgramReport
from pipesight.analysis.program_time import OWN, REST, Pieces, part_title
from pipesight.analysis.report import Report
from pipesight.runs.reading.run import Run
from pipesight.view.finding_sentences import nonfinite_in
from pipesight.view.payload.log_lines import logs_of
from pipesight.view.payload.memory_curves import last_counted, memory_of
from pipesight.view.payload.rank_traffic import traffic_of
from pipesight.view.payload.run_summary import facts_of, findings_of, title_of, verdict_of
from pipesight.view.payload.size_limits import Limits
from pipesight.view.payload.span_rows import Names, curve_columns, kind_of, moments_between, span_columns
from pipesight.view.payload.statistic_tables import statistics_of
from pipesight.view.payload.step_choice import choose_steps
from pipesight.view.text_program import lead_text

__all__ = ["program_payload"]

MODULES = 2_000
"""How many modules the page lists."""
_MEANINGS = {
    "data_loading": "The main thread waits for the next batch.",
    "forward": "Calls of modules, without what runs inside them under another name.",
    "loss": "Calls of loss modules.",
    "recompute": "Calls of modules during a backward: activations that checkpointing did not keep.",
    "backward": "Computing gradients.",
    "optimizer": "The optimizer's step.",
    "communication": "The main thread communicates with other ranks, or waits for them.",
    "checkpoints": "Saving and loading checkpoints.",
    "copies": "Copies between devices.",
    "evaluation": "Calls of modules without gradients.",
    REST: "What no span covers: the program's own code. Put spans around it to see what it is.",
}
_BUSY = {"forward", "loss", "recompute", "backward"}


def program_payload(
    run: Run,
    report: Report,
    program: ProgramReport,
    *,
    limits: Limits,
    steps: range | None = None,
    first: int | None = None,
) -> dict[str, Any]:
    """Return what the page draws of a program.

    The report is of the same ``steps``, if not of all. The page opens at step ``first``; by default, a typical one.
    """
    names = Names()
    numbers, begins, ends = _steps(program, steps)
    chosen = _chosen(program, numbers, ends - begins, limits, first, last_counted(report.memory))
    shown = [_step(report, program, numbers[k], int(begins[k]), int(ends[k]), names, limits) for k in sorted(chosen)]
    shown_numbers = [step["number"] for step in shown]
    lines = (line for line in run.statistics() if steps is None or line.get("iteration") in steps)
    statistics, marks = statistics_of(lines, most=limits.values, layers=[])
    said = (line for line in run.log_lines() if steps is None or line.step is None or line.step in steps)
    start = numbers[chosen[0]] if chosen else None
    return {
        "version": 1,
        "revision": 0,
        "live": False,
        "path": str(run.path),
        "title": title_of(run.path),
        "scope": None if steps is None else f"steps {numbers[0]} to {numbers[-1]}" if numbers else None,
        "facts": facts_of(report),
        "alarm": _alarm(report, shown_numbers),
        "verdict": verdict_of(report),
        "findings": _with_lead(report),
        "figures": _figures(program),
        "losses": _losses(program),
        "ranks": program.ranks,
        "replicas": 1,
        "chunks": 1,
        "lanes": [],
        "programs": sorted(program.pieces),
        "levels": {str(rank): _levels(own) + (rank in program.background.rank) for rank, own in program.pieces.items()},
        "background": {
            str(rank): _levels(own) for rank, own in program.pieces.items() if rank in program.background.rank
        },
        "span_names": names.all,
        "layers": _modules(program),
        "layers_title": "Modules",
        "layers_note": f"time in each alone; mean of {program.modules.steps} steps that show all modules",
        "steps": {
            "number": numbers,
            "time": (ends - begins).tolist(),
            "bubble": [None] * len(numbers),
            "nonfinite": sorted({*marks.of_step, *_bad_steps(report)}),
        },
        "shown": shown,
        "start": shown_numbers.index(start) if start in shown_numbers else 0,
        "statistics": statistics,
        "curves": curve_columns(report.curves),
        "memory": memory_of(report.memory, {numbers[k]: int(begins[k]) for k in chosen}),
        "logs": logs_of(
            said, steps=shown_numbers, begin=int(begins.min()) if len(begins) else 0, most=limits.log_lines
        ),
        "traffic": traffic_of(report),
        "timers": [],
        "names": [],
        "notes": _notes(shown, numbers),
        "traces": [],
    }


def _steps(program: ProgramReport, only: range | None) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return the numbers of all steps, when they begin on the first rank, and end on the last."""
    steps = program.all_steps
    numbers, which = np.unique(steps.step, return_inverse=True)
    begin = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(begin, which, steps.begin)
    end = np.zeros(len(numbers), np.int64)
    np.maximum.at(end, which, steps.end)
    kept = np.ones(len(numbers), bool) if only is None else np.isin(numbers, np.array(only))
    return numbers[kept].tolist(), begin[kept], end[kept]


def _chosen(
    program: ProgramReport,
    numbers: Sequence[int],
    times: np.ndarray,
    limits: Limits,
    first: int | None,
    also: int | None,
) -> list[int]:
    """Return the places of steps to show, most important first."""
    sizes = np.zeros(len(numbers), np.int64)
    for rank, own in program.pieces.items():
        steps = program.all_steps.where(program.all_steps.rank == rank)
        of = np.searchsorted(numbers, steps.step[own.step])
        inside = of < len(numbers)
        np.add.at(sizes, of[inside], 1)
    places = [numbers.index(number) if number in numbers else None for number in (program.typical, first, also)]
    wanted = dict(zip(("typical", "first", "also"), places, strict=True))
    return choose_steps(times, sizes, most=limits.blocks // 2, **wanted)


def _levels(pieces: Pieces) -> int:
    """Return how many rows the spans of a rank need; what runs in the background has the next."""
    return int(pieces.depth.max(initial=0)) + 1


def _step(
    report: Report, program: ProgramReport, number: int, begin: int, end: int, names: Names, limits: Limits
) -> dict[str, Any]:
    spans = span_columns()
    for rank, own in program.pieces.items():
        steps = program.all_steps.where(program.all_steps.rank == rank)
        rows = np.flatnonzero(steps.step[own.step] == number)[: limits.blocks // 2]
        for row in rows.tolist():
            part = own.part[row]
            spans["rank"].append(rank)
            spans["kind"].append(kind_of(part))
            spans["begin"].append(int(own.spans.begin[row]) - begin)
            spans["time"].append(int(own.spans.end[row] - own.spans.begin[row]))
            spans["name"].append(names.place(_name(own.spans, row, part)))
            spans["level"].append(int(own.depth[row]))
        beside = program.background
        for row in np.flatnonzero((beside.rank == rank) & (beside.begin < end) & (beside.end > begin)).tolist():
            since, until = max(int(beside.begin[row]), begin), min(int(beside.end[row]), end)
            spans["rank"].append(rank)
            spans["kind"].append(kind_of("communication"))
            spans["begin"].append(since - begin)
            spans["time"].append(until - since)
            spans["name"].append(names.place(f"{beside.name[row]} in the background"))
            spans["level"].append(_levels(own))
    parts = program.parts_of_step(number)
    return {
        "number": number,
        "end": end - begin,
        "windows": [],
        "lane_bubbles": [],
        "bubble": None,
        "losses": None if parts is None else [round(parts[part]) for part in program.parts],
        "nonfinite": [],
        "tasks": {name: [] for name in ("lane", "microbatch", "phase", "begin", "time")},
        "transfers": {name: [] for name in ("lane", "begin", "time")},
        "layers": None,
        "spans": spans,
        "moments": moments_between(report.moments, begin, end),
    }


def _name(spans: Any, row: int, part: str) -> str:
    layer, module = str(spans.layer[row]), str(spans.module[row])
    if layer or module:
        return layer or module
    if part.startswith(OWN):
        return part_title(part)
    return part_title(part) if spans.category[row] != "comm" else str(spans.name[row])


def _figures(program: ProgramReport) -> dict[str, Any]:
    return {
        "bubble": None,
        "bound": None,
        "steps": program.count,
        "unit": "step" if program.trains else "batch",
        "median_step": program.time.median,
        "mean_step": sum(program.parts.values()),
        "elapsed": program.elapsed,
        "samples_per_second": program.samples_per_second,
        "steps_per_second": program.count / program.elapsed * 1e6,
        "recompute": 0,
    }


def _losses(program: ProgramReport) -> dict[str, Any]:
    parts = [
        {
            "key": "own" if part.startswith(OWN) else part,
            "name": part_title(part),
            "text": _MEANINGS.get(part, "A span of yours, without what is inside it."),
            "kind": "busy" if part in _BUSY else "outside",
        }
        for part in program.parts
    ]
    run = {"all": [round(spent) for spent in program.parts.values()], "lanes": []}
    titles = [["busy", "Modules"], ["outside", "The rest of the step"]]
    return {
        "parts": parts,
        "steps": program.count,
        "run": run,
        "groups": titles,
        "period": "from its begin to the next",
    }


def _modules(program: ProgramReport) -> list[dict[str, Any]]:
    return [
        {
            "name": module.name,
            "class": module.type,
            "partition": None,
            "calls": round(module.calls, 2),
            "forward": round(module.forward, 1),
            "recompute": round(module.recompute, 1) if module.recompute else None,
            "backward": round(module.backward, 1),
            "longest": None,
            "share": round(module.share, 5),
            "parameter_bytes": None,
        }
        for module in program.modules.modules[:MODULES]
    ]


def _alarm(report: Report, shown: Sequence[int]) -> dict[str, Any] | None:
    said, found = nonfinite_in(report), report.nonfinite
    if said is None or found is None:
        return None
    step = found.iteration if found.iteration in shown else None
    where = {"lane": None, "phase": None, "microbatch": None}
    return {"text": said.text, "step": step, "layer": found.layer, "tensor": found.tensor, **where}


def _with_lead(report: Report) -> list[dict[str, Any]]:
    found = findings_of(report)
    if report.lead is not None:
        found.insert(0, {"title": "As a pipeline", "entries": [[lead_text(report.lead), []]], "more": 0})
    return found


def _bad_steps(report: Report) -> list[int]:
    loss = [curve for curve in report.curves if curve.name == "loss"]
    return [
        step for curve in loss for step, value in zip(curve.steps, curve.values, strict=True) if not np.isfinite(value)
    ]


def _notes(shown: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> list[str]:
    if len(shown) == len(numbers):
        return []
    return [
        f"The timeline shows {len(shown):,} of {len(numbers):,} steps: the first, the last, the slowest, a typical "
        "one, and others evenly between them."
    ]
