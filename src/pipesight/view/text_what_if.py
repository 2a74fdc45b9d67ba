"""The replays of a job, for the terminal: how long a step would take without stragglers, and who slows it."""

from __future__ import annotations

from pipesight._formatting import time
from pipesight._plurals import plural
from pipesight.analysis.what_if import WhatIf
from pipesight.view.text_layout import Style, columns

__all__ = ["what_if_block"]

REPLICAS = 8
"""How many data-parallel ranks are listed, those first that slow the job most."""
OPERATIONS = 5
"""How many kinds of operations are listed."""
VISIBLE = 1.005
"""Slowdowns below this are those of no straggler."""
MARKED = 1.05
"""Workers that slow the job so much are marked."""
FEW = 8
"""As many stages are listed in any case, below each other where the terminal is narrow."""
CELL = 8
"""Columns of a number in the table of workers."""


def what_if_block(found: WhatIf, style: Style, *, is_verdict: bool) -> list[str]:
    """List the replays, and the slowdowns that they show, if anything slows the job.

    With ``is_verdict``, the report began with their verdict; else they are told in short.
    """
    title = style.paint("What if there were no stragglers (replayed)", "bold")
    if not is_verdict:
        return [title, *_in_short(found, style), *_doubts(found, style), *_workers(found, style, least=MARKED)]
    more = "more" if found.error >= 0 else "less"
    rows = [
        ["Replayed step", time(found.replayed), f"as recorded it is {abs(found.error):.1%} {more}"],
        ["Ideal step", time(found.ideal), "if all operations of a kind took the same"],
    ]
    if found.reordered is not None:
        rows.append(["Reordered step", time(found.reordered), "if the longest micro-batches came in the middle"])
    if found.exchanged is not None:
        rows.append(["Exchanged step", time(found.exchanged), "if replicas exchanged some, too, to have the same work"])
    rows.append(["Slowdown", f"{found.slowdown:.2f}", "S: replayed by ideal step"])
    for name, share, who in (("M_W", found.m_w, "slowest 3% of workers are"), ("M_S", found.m_s, "last stage is")):
        if share is not None and found.is_certain:
            rows.append([name, f"{round(share, 2) + 0.0:.2f}", f"share of the slowdown that goes if the {who} ideal"])
    lines = [title]
    for head, (*_, note) in zip(columns([row[:2] for row in rows], align="lr"), rows, strict=True):
        lines += style.wrapped(note, indent=" " * (len(head) + 4), first=f"  {head}  ")
    if slow := _slow_kinds(found):
        lines += style.wrapped(f"Slowdown by {slow}", indent="    ", first="  ")
    return lines + _doubts(found, style) + _workers(found, style)


def _in_short(found: WhatIf, style: Style) -> list[str]:
    """Say what slows the job, and how long steps would take."""
    lines = style.wrapped(found.verdict, indent="  ", first="  ")
    if not found.causes:
        return lines
    steps = {"replayed": found.replayed, "ideal": found.ideal}
    steps |= {"reordered": found.reordered} if found.reordered is not None else {}
    steps |= {"exchanged": found.exchanged} if found.exchanged is not None else {}
    figures = ", ".join(f"{name} {time(length)}" for name, length in steps.items())
    slow = _slow_kinds(found)
    return lines + style.wrapped(
        f"Steps: {figures}{f'; slowdown by {slow}' if slow else ''}", indent="    ", first="  "
    )


def _slow_kinds(found: WhatIf) -> str:
    kinds = sorted(found.by_operation.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {slowdown:.2f}" for name, slowdown in kinds[:OPERATIONS] if slowdown >= VISIBLE)


def _doubts(found: WhatIf, style: Style) -> list[str]:
    sentences = (f"{remark[0].upper()}{remark[1:]}." for remark in found.remarks)
    return [line for sentence in sentences for line in style.wrapped(sentence, indent="  ", first="  ")]


def _workers(found: WhatIf, style: Style, *, least: float = 0.0) -> list[str]:
    """List the slowdown of each worker, if any has the least: a row per data-parallel rank, a column per stage."""
    layout = found.layout
    if len(layout.dp_ranks) * len(layout.stages) < 2:
        return []
    if max(found.by_worker.values(), default=0.0) < least:
        return []
    fits = max((style.width - 12) // CELL, FEW)
    worst = sorted(range(len(layout.stages)), key=lambda s: -found.by_stage[layout.stages[s]])[:fits]
    shown = sorted(worst)
    slowest = sorted(range(len(layout.dp_ranks)), key=lambda d: -found.by_dp_rank[layout.dp_ranks[d]])[:REPLICAS]
    head = ["replica", *(f"stage {layout.stages[s]}" for s in shown)]
    table = [[style.paint(cell, "dim") for cell in head]]
    for d in slowest:
        cells = ["" if layout.ranks[d][s] is None else f"{found.slowdown_of(d, s):.2f}" for s in shown]
        table.append([str(layout.dp_ranks[d]), *(_marked(cell, style) for cell in cells)])
    lines = ["  Slowdown by worker"]
    lines += [f"    {line}" for line in columns(table, align="r" * len(head), width=style.width - 4)]
    left = [
        f"{count} more {plural(count, name)}"
        for count, name in (
            (len(layout.dp_ranks) - len(slowest), "replica"),
            (len(layout.stages) - len(shown), "stage"),
        )
        if count
    ]
    if left:
        lines.append(style.paint(f"    and {' and '.join(left)}, slowing the job less", "dim"))
    return lines


def _marked(cell: str, style: Style) -> str:
    return style.paint(cell, "red", "bold") if cell and float(cell) >= MARKED else cell
