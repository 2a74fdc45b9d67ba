"""A page that draws timelines of schedules below each other, in one scale: lanes are devices, blocks are tasks.

It is one file without scripts or requests: SVG, and a table of the same plans. Kinds of tasks differ by their letter,
by their shape and by hatching, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from pipesight.schedule.simulation import Times
from pipesight.schedule.task_orders import KINDS, Schedule

__all__ = ["PlanTimeline", "page"]

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


def page(
    title: str,
    timelines: Sequence[PlanTimeline],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> str:
    """Return the page as HTML. All text in it is escaped."""
    longest = max(timeline.length for timeline in timelines)
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    legend = "".join(
        f'<span><svg width="34" height="20" aria-hidden="true">{_block(kind, 1, 1, 32, 18, KINDS[kind])}</svg>'
        f"{escape(name)}</span>"
        for kind, name in enumerate(NAMES)
    )
    drawings = "".join(_section(timeline, longest) for timeline in timelines)
    remarks = "".join(f"<p>Note: {escape(note)}.</p>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{_PATTERNS}</defs></svg>
<h1>{escape(title)}</h1>
<p class="legend">{legend}</p>
{drawings}
<h2>Plans</h2>
<div class="wide" tabindex="0" role="region" aria-label="Plans"><table><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
{remarks}
</body></html>
"""


def _section(timeline: PlanTimeline, longest: float) -> str:
    title, text = escape(timeline.title), escape(timeline.text)
    heading = f"<section><h2>{title}</h2><p>{text}</p>"
    if timeline.schedule.tasks > MOST_TASKS:
        return f"{heading}<p>Not drawn: it has {timeline.schedule.tasks:,} tasks.</p></section>"
    return (
        f'{heading}<div class="wide" tabindex="0" role="region" aria-label="{title}">'
        f"{_drawing(timeline, longest)}</div></section>"
    )


def _drawing(timeline: PlanTimeline, longest: float) -> str:
    schedule = timeline.schedule
    scale = (WIDTH - LABEL - 2) / max(longest, 1e-12)
    height = schedule.devices * (LANE + GAP) + 22
    parts = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(timeline.title)}: {escape(timeline.text)}">'
    ]
    several = schedule.stages > schedule.devices
    for device in range(schedule.devices):
        top = device * (LANE + GAP)
        parts.append(f'<text class="lane" x="0" y="{top + 20}">device {device}</text>')
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
    parts.append(f'<text class="lane" x="{LABEL}" y="{bottom}">0</text>')
    end_at = LABEL + timeline.length * scale
    parts.append(
        f'<text class="lane" x="{end_at:.2f}" y="{bottom}" text-anchor="end">{timeline.length * 1e3:.2f} ms</text>'
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
            f'<rect class="bar" x="{x:.2f}" y="{y + height - 4:.2f}" width="{max(width, 0.4):.2f}" height="4"/>'
        )
    if width >= NARROWEST + 5 * max(0, len(word) - 2):
        shapes.append(f'<text class="word" x="{x + width / 2:.2f}" y="{y + height / 2 + 4:.2f}">{escape(word)}</text>')
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f"<g>{title}{''.join(shapes)}</g>"


_PATTERNS = (
    '<pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="mark" width="1.6" height="6"/></pattern>'
    '<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<circle class="mark" cx="2" cy="2" r="1.1"/></pattern>'
)

_STYLE = """
:root{color-scheme:light dark;--text:#1d2330;--soft:#5b6475;--back:#ffffff;--idle:#eef0f4;--line:#c9cedb;
--F:#bcd7f7;--R:#f6e3ae;--B:#f3bfae;--W:#cfe6c8;--bar:#7d2f14;--mark:#00000030;--word:#16202e}
@media(prefers-color-scheme:dark){:root{--text:#e6e9f0;--soft:#a3acbd;--back:#12151c;--idle:#1f2430;--line:#394152;
--F:#26527f;--R:#6b5413;--B:#7c3a24;--W:#2f5a2b;--bar:#f2a98c;--mark:#ffffff38;--word:#f2f5fa}}
body{margin:0 auto;padding:16px;max-width:1200px;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4em;overflow-wrap:anywhere}h2{font-size:1.1em;margin:1.2em 0 0}p{margin:.2em 0 .6em;color:var(--soft)}
.wide{overflow-x:auto}.wide:focus-visible{outline:2px solid var(--F)}
.timeline{display:block;min-width:1000px;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px}.legend span{display:flex;align-items:center;gap:6px}
.idle{fill:var(--idle)}.F{fill:var(--F)}.R{fill:var(--R)}.B{fill:var(--B)}.W{fill:var(--W)}
.F,.R,.B,.W{stroke:var(--back);stroke-width:.6}.bar{fill:var(--bar)}.mark{fill:var(--mark)}
.word{font:11px system-ui,sans-serif;text-anchor:middle;fill:var(--word)}.lane{font:12px system-ui,sans-serif;
fill:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:600}
"""
