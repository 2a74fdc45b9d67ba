"""A report in a notebook: the verdict, the figures, a drawn step, and where the time goes, as HTML without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipesight._formatting import percent, rate, time
from pipesight.analysis.lane_bubbles import lanes_of
from pipesight.analysis.program_report import ProgramReport
from pipesight.analysis.program_time import OWN, part_title
from pipesight.analysis.report import Report
from pipesight.analysis.step_grouping import EVALUATION
from pipesight.analysis.verdict import TITLES
from pipesight.runs.reading.event_codes import PHASES

if TYPE_CHECKING:
    from pipesight.runs.reading.run import Run

__all__ = ["report_html", "run_html"]

WIDTH, ROW, LEFT = 900, 22, 90
MOST_BLOCKS = 4_000
"""The most blocks that are drawn; a step with more is not."""
MOST_ROWS = 64

_COLOURS = {
    "forward": "#8fb1cf",
    "loss": "#a79cc9",
    "recompute": "#b9cbdc",
    "backward": "#3c6e9e",
    "weight": "#284f76",
    "data_loading": "#2f6fb0",
    "optimizer": "#6b5bb0",
    "checkpoints": "#8a6d1f",
    "communication": "#1f7a6d",
    "copies": "#1f7a6d",
    "evaluation": "#5f7a52",
    "own": "#b0552f",
}


@dataclass(frozen=True, slots=True)
class _Block:
    row: int
    begin: int
    end: int
    colour: str
    name: str


def run_html(run: Run) -> str:
    """Return the report of a run as HTML."""
    from pipesight.analysis.analyse import analyse

    return report_html(analyse(run))


def report_html(report: Report) -> str:
    """Return a report as HTML."""
    program = report.program
    blocks: list[str] = [f"<b>{_text(report.path)}</b><p><b>{_text(report.verdict.text)}</b></p>"]
    if report.verdict.changes:
        rows = [
            [f"{change.promise} {percent(change.gain)}", change.what, change.why] for change in report.verdict.changes
        ]
        blocks.append(_table(["saves", "what", "why"], rows))
    blocks.append(_table([], _figures(report)))
    if program is not None:
        blocks.append(_drawn(*_of_program(program)))
    elif report.typical is not None:
        blocks.append(_drawn(*_of_pipeline(report, report.typical)))
    parts = _parts(report)
    total = max(sum(spent for _, spent in parts), 1e-9)
    rows = [[name, time(spent), percent(spent / total)] for name, spent in parts if spent >= total * 0.0005]
    if rows:
        blocks.append(_table(["where the time goes", "mean step", "share"], rows))
    return f'<div class="pipesight">{"".join(blocks)}</div>'


def _figures(report: Report) -> list[list[str]]:
    program, overall = report.program, report.overall
    if program is not None:
        found = [[f"{'step' if program.trains else 'batch'} time", time(program.time.median), "median"]]
        if program.samples_per_second is not None:
            found.append(["throughput", f"{rate(program.samples_per_second)} samples/s", ""])
        return found
    if overall is None:
        return []
    found = [
        ["step time", time(overall.time.median), "median"],
        ["bubble", percent(overall.bubble), f"schedule alone {percent(overall.bound)}"],
    ]
    if overall.samples_per_second is not None:
        found.append(["throughput", f"{rate(overall.samples_per_second)} samples/s", ""])
    return found


def _parts(report: Report) -> list[tuple[str, float]]:
    if report.program is not None:
        return [(part_title(part), spent) for part, spent in report.program.parts.items()]
    if report.overall is None:
        return []
    named = [(span.name, span.part, span.time) for span in report.own_times]
    rest = dict(report.overall.parts)
    for _, part, spent in named:
        rest[part] -= spent
    return [*((TITLES[part], spent) for part, spent in rest.items()), *((name, spent) for name, _, spent in named)]


def _of_program(program: ProgramReport) -> tuple[str, list[str], list[_Block], int]:
    """Return the title of a typical step, its rows, its spans and its length."""
    number = program.typical
    steps = program.all_steps
    chosen = steps.where(steps.step == number)
    begin, end = int(chosen.begin.min()), int(chosen.end.max())
    names: list[str] = []
    blocks = []
    for rank, pieces in program.pieces.items():
        own = steps.where(steps.rank == rank)
        rows = np.flatnonzero(own.step[pieces.step] == number)
        first = len(names)
        names += [f"rank {rank}" if program.ranks > 1 else "program"]
        names += [""] * int(pieces.depth[rows].max(initial=0))
        for row in rows.tolist():
            part, spans = pieces.part[row], pieces.spans
            name = str(spans.layer[row] or spans.module[row]) or part_title(part)
            at = (int(spans.begin[row]) - begin, int(spans.end[row]) - begin)
            blocks.append(_Block(first + int(pieces.depth[row]), *at, _colour(part), name))
    return f"Step {number}, {time(end - begin)}", names, blocks, end - begin


def _of_pipeline(report: Report, number: int) -> tuple[str, list[str], list[_Block], int]:
    """Return the title of a step, its rows, its tasks and its length."""
    minibatches = report.minibatches
    rows = minibatches.where((minibatches.step == number) & (minibatches.kind != EVALUATION))
    tasks = report.tasks.where(rows.task_rows())
    begin, end = int(tasks.begin.min()), int(tasks.end.max())
    lanes = lanes_of(tasks, report.replicas)
    place = {(lane.rank, lane.partition): k for k, lane in enumerate(lanes)}
    many = len({lane.rank for lane in lanes}) > 1
    names = [f"rank {lane.rank}, {lane.partition}" if many else f"partition {lane.partition}" for lane in lanes]
    blocks = [
        _Block(place[rank, j], a - begin, b - begin, _COLOURS[PHASES[phase]], f"{PHASES[phase][0].upper()}{i}")
        for rank, j, i, phase, a, b in zip(
            *(column.tolist() for column in (tasks.rank, tasks.partition, tasks.microbatch, tasks.phase)),
            tasks.begin.tolist(),
            tasks.end.tolist(),
            strict=True,
        )
    ]
    return f"Step {number}, window {time(end - begin)}", names, blocks, end - begin


def _colour(part: str) -> str:
    return _COLOURS["own" if part.startswith(OWN) else part] if part != "between" else "#999999"


def _drawn(title: str, names: Sequence[str], blocks: Sequence[_Block], length: int) -> str:
    if len(blocks) > MOST_BLOCKS or len(names) > MOST_ROWS or not blocks:
        return f"<p>{_text(title)}: {len(blocks):,} blocks, too many to draw here; see <code>pipesight view</code></p>"
    scale, height = (WIDTH - LEFT) / max(length, 1), ROW * len(names) + 4
    parts = [
        f'<text x="0" y="{row * ROW + 15}" font-size="12" fill="currentColor">{_text(name)}</text>'
        for row, name in enumerate(names)
        if name
    ]
    for block in blocks:
        x, width = LEFT + block.begin * scale, max((block.end - block.begin) * scale, 0.5)
        tip = f"<title>{_text(block.name)}: {time(block.end - block.begin)}</title>"
        parts.append(
            f'<g>{tip}<rect x="{x:.1f}" y="{block.row * ROW + 2}" width="{width:.1f}" height="{ROW - 3}" '
            f'fill="{block.colour}"/>'
        )
        if width > 7 * len(block.name) + 4:
            dark = block.colour in ("#8fb1cf", "#b9cbdc", "#a79cc9")
            parts.append(
                f'<text x="{x + 3:.1f}" y="{block.row * ROW + 15}" font-size="11" '
                f'fill="{"#111820" if dark else "#ffffff"}">{_text(block.name)}</text>'
            )
        parts.append("</g>")
    picture = f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:{WIDTH}px" role="img">'
    return f"<p>{_text(title)}</p>{picture}{''.join(parts)}</svg>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    top = f"<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in head)}</tr>" if head else ""
    lines = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{lines}</table>"


def _text(text: str) -> str:
    return html.escape(str(text))
