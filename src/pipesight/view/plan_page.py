"""Plans on a page: timelines of schedules below each other, in one scale, and a table; lanes are devices.

They are a part of the page of a run. Plans for a model, of which there is no run, have a page of their own, without
scripts. Kinds of tasks differ by their letter, by their shape and by hatching, not by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

from pipesight._formatting import time
from pipesight.analysis.plan_outcome import Outcome
from pipesight.plan.plans import simulated
from pipesight.schedule.simulation import Times
from pipesight.schedule.task_orders import KINDS, Schedule
from pipesight.view.page_assets import fill_page, fill_part
from pipesight.view.plan_table import HEADINGS, notes_on, table_rows

__all__ = ["plan_page", "plan_sections"]

LANE, GAP, LABEL, WIDTH = 30, 6, 62, 1160
NARROWEST = 13
"""Blocks that are narrower than so many units have no room for a word."""
MOST_TASKS = 20_000
NAMES = ("forward", "recompute", "backward", "weight gradient")


@dataclass(frozen=True, slots=True, eq=False)
class PlanTimeline:
    """A schedule, and when its tasks run, in seconds: by kind, stage and micro-batch, NaN where there is none."""

    title: str
    text: str
    schedule: Schedule
    begin: Times
    end: Times

    @property
    def length(self) -> float:
        """When the last task ends."""
        return float(np.nanmax(self.end))


def plan_page(name: str, outcome: Outcome) -> str:
    """Return a page with the plans for a model alone."""
    return fill_page("plan_page", title=f"Plans for {name}", values={"plans": plan_sections(outcome)})


def plan_sections(outcome: Outcome) -> str:
    """Return the plans as a part of a page: a table, and the timelines of the recorded and the best ones."""
    shown = outcome.worth_listing()
    timelines = _timelines(outcome)
    longest = max(timeline.length for timeline in timelines)
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in HEADINGS)
    rows = table_rows(outcome, shown)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    notes = [f"Note: {note}." for note in notes_on(outcome, shown)]
    if any(not plan.proven for plan in shown):
        notes.insert(0, "* Another balance may be faster: the search stopped before it had ruled out all others.")
    values = {
        "timelines": "\n".join(_section(timeline, longest) for timeline in timelines),
        "table": f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        "notes": "".join(f'<p class="soft">{escape(note)}</p>' for note in notes),
    }
    return fill_part("plan_sections", values)


def _timelines(outcome: Outcome) -> list[PlanTimeline]:
    """Return what was recorded, the fastest plan that the run's engine can run, and the fastest of all."""
    found = []
    if (known := outcome.measured) is not None:
        text = f"step {time(known.step_seconds * 1e6)}, bubble {known.bubble:.1%}; a typical mini-batch"
        what = f"Recorded: {known.schedule_name}, {known.schedule.chunks} chunks, checkpoint {known.checkpoint}"
        found.append(PlanTimeline(what, text, known.schedule, known.begin, known.end))
    drawn = {id(plan): plan for plan in (outcome.fastest_to_run(), outcome.plans[0]) if plan is not None}
    for plan in drawn.values():
        setting, times = plan.setting, simulated(outcome.costs, plan)
        what = f"Planned: {plan.schedule_name}, {setting.chunks} chunks, checkpoint {setting.checkpoint}"
        text = f"step {time(plan.step_seconds * 1e6)}, bubble {plan.bubble:.1%}, balance {list(plan.balance)}"
        found.append(PlanTimeline(what, text, times.schedule, times.begin, times.end))
    return found


def _section(timeline: PlanTimeline, longest: float) -> str:
    title, text = escape(timeline.title), escape(timeline.text)
    heading = f'<section class="card"><div class="bar"><h2>{title}</h2><p class="facts">{text}</p></div>'
    if timeline.schedule.tasks > MOST_TASKS:
        return f'{heading}<p class="soft">Not drawn: it has {timeline.schedule.tasks:,} tasks.</p></section>'
    drawing = _drawing(timeline, longest)
    scroller = f'<div class="scroller" tabindex="0" role="region" aria-label="{title}">{drawing}</div>'
    return f'{heading}{scroller}<ul class="legend">{_legend(timeline)}</ul></section>'


def _legend(timeline: PlanTimeline) -> str:
    """Name the kinds of tasks that a timeline has."""
    return "".join(
        f'<li><svg class="plan" width="34" height="20" aria-hidden="true">{_block(kind, 1, 1, 32, 18, KINDS[kind])}'
        f"</svg>{escape(name)}</li>"
        for kind, name in enumerate(NAMES)
        if (timeline.schedule.order[..., 0] == kind).any()
    )


def _drawing(timeline: PlanTimeline, longest: float) -> str:
    schedule = timeline.schedule
    scale = (WIDTH - LABEL - 2) / max(longest, 1e-12)
    height = schedule.devices * (LANE + GAP) + 22
    parts = [
        f'<svg class="plan whole" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(timeline.title)}: {escape(timeline.text)}">'
    ]
    several = schedule.stages > schedule.devices
    for device in range(schedule.devices):
        top = device * (LANE + GAP)
        parts.append(f'<text class="axis" x="0" y="{top + 20}">device {device}</text>')
        parts.append(
            f'<rect class="idle" x="{LABEL}" y="{top}" width="{timeline.length * scale:.2f}" height="{LANE}"/>'
        )
        for kind, stage, i in schedule.order[device].tolist():
            if kind < 0:
                continue
            begin, end = float(timeline.begin[kind, stage, i]), float(timeline.end[kind, stage, i])
            where = f"stage {stage}" if several else f"partition {stage}"
            tip = f"{NAMES[kind]} of micro-batch {i}, {where}: {begin * 1e3:.2f} to {end * 1e3:.2f} ms"
            word = f"{KINDS[kind]}{i}"
            parts.append(_block(kind, LABEL + begin * scale, top, (end - begin) * scale, LANE, word, tip))
    bottom = height - 6
    parts.append(f'<text class="axis" x="{LABEL}" y="{bottom}">0</text>')
    end_at = LABEL + timeline.length * scale
    parts.append(
        f'<text class="axis" x="{end_at:.2f}" y="{bottom}" text-anchor="end">{time(timeline.length * 1e6)}</text>'
    )
    return "".join([*parts, "</svg>"])


def _block(kind: int, x: float, y: float, width: float, height: float, word: str, tip: str = "") -> str:
    """Draw a task. A recomputation is striped and less high, a backward has a bar below, a weight gradient has dots."""
    inset = height / 5 if kind == 1 else 0.0
    box = f'x="{x:.2f}" y="{y + inset:.2f}" width="{max(width, 0.4):.2f}" height="{height - 2 * inset:.2f}"'
    shapes = [f'<rect class="{"FRBW"[kind]}" {box}/>']
    if kind in (1, 3):
        shapes.append(f'<rect class="hatch" fill="url(#{"stripes" if kind == 1 else "dots"})" {box}/>')
    if kind == 2:
        shapes.append(
            f'<rect class="edge" x="{x:.2f}" y="{y + height - 4:.2f}" width="{max(width, 0.4):.2f}" height="4"/>'
        )
    if width >= NARROWEST + 5 * max(0, len(word) - 2):
        place = f'x="{x + width / 2:.2f}" y="{y + height / 2 + 4:.2f}"'
        shapes.append(f'<text class="word of-{"FRBW"[kind]}" {place}>{escape(word)}</text>')
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f"<g>{title}{''.join(shapes)}</g>"
