"""A report as text for the terminal: the verdict first, then the numbers, then what they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipesight._plurals import count_of
from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.formatting import percent, rate, time
from pipesight.analysis.pipeline_report import PartitionReport, PipelineReport
from pipesight.analysis.report import Overall, Report
from pipesight.analysis.step_breakdown import OUTSIDE, PARTS
from pipesight.analysis.verdict import TITLES
from pipesight.runs.reading.event_tables import RECOMPUTE, WEIGHT
from pipesight.view.finding_sentences import (
    Finding,
    finding_groups,
    nonfinite_in,
    remarks_in,
    warm_up_in,
)
from pipesight.view.text_layout import Style, bar, beside, columns, shown_width, spark
from pipesight.view.text_timeline import DRAWN, Glyphs, coloured, draw_step

__all__ = ["render"]

FEW = 4
"""Steps, of which it takes as many at least to draw them all."""
LAYERS = 8
"""How many of the slowest layers are listed."""
PARTITIONS = 16
"""How many partitions are listed; of more, those with the largest and the smallest bubbles."""
MOST = {"Stragglers": 5, "Waits for one rank": 5, "Links": 8, "Collectives": 5, "Remarks": 10}
"""How many findings are listed under each heading."""

_SHORT = {**TITLES, "fill_and_drain": "fill", "sharing": "sharing", "transfers": "transfer", "host_gaps": "host gap"}
_SHORTEST = {"fill_and_drain": "fill", "sharing": "share", "imbalance": "imbal."}
_SHORTEST |= {"jitter": "jitter", "transfers": "transf.", "host_gaps": "gaps"}


def render(
    report: Report, *, width: int = 80, step: int | None = None, colour: bool = False, ascii: bool = False
) -> str:
    """Write a report as text that is at most ``width`` columns wide.

    Args:
        report: What `analyse` returns.
        width: At least 60.
        step: The step to draw; by default, a typical one.
        colour: Whether to use the escape codes for it.
        ascii: Whether to keep to characters that every terminal has.

    Raises:
        ValueError: There is no such step.
    """
    style = Style(max(width, 60), colour, ascii)
    blocks = [_head(report, style)]
    if (bad := nonfinite_in(report)) is not None:
        blocks.append([style.paint(line, "red", "bold") for line in style.wrapped(bad.text)])
    blocks.append(_verdict(report, style))
    if report.overall is not None:
        blocks.append(_speed(report, report.overall, style))
    drawn = report.typical if step is None else step
    if drawn is not None:
        blocks.append(_timeline(report, drawn, style))
    if report.overall is not None:
        where = _where(report.overall, style)
        if report.layers:
            blocks.append(beside(where, _layers(report, style), width=style.width))
        else:
            blocks.append(where)
        blocks += [_partitions(pipeline, report, style) for pipeline in report.pipelines]
    elif report.layers:
        blocks.append(_layers(report, style))
    blocks += [_findings(title, found, MOST[title], style) for title, found in finding_groups(report)]
    if report.names:
        blocks.append(_names(report, style))
    if remarks := remarks_in(report):
        blocks.append(_findings("Remarks", remarks, MOST["Remarks"], style))
    text = "\n\n".join("\n".join(map(style.fit, block)) for block in blocks if block) + "\n"
    return text.replace("µs", "us") if ascii else text


def _head(report: Report, style: Style) -> list[str]:
    counted = count_of(report.events, "event")
    if len(report.steps):
        counted = f"{count_of(len({*report.steps.step.tolist()}), 'step')}, {counted}"
    if len(report.ranks) > 1:
        counted = f"{len(report.ranks)} ranks, {counted}"
    title = style.plain(report.path)
    space = style.width - len(title) - len(counted)
    if space >= 3:
        lines = [style.paint(title, "bold") + " " * space + style.paint(counted, "dim")]
    else:
        lines = [style.paint(line, "bold") for line in style.wrapped(title)] + [style.paint(counted, "dim")]
    for pipeline in report.pipelines:
        lines += [style.paint(line, "dim") for line in style.wrapped(_shape(pipeline), indent="  ", first="")]
    return lines


def _shape(pipeline: PipelineReport) -> str:
    """Describe a pipeline."""
    facts = pipeline.facts
    where = f" on {count_of(pipeline.workers, 'rank')}" if pipeline.workers < pipeline.partitions else ""
    chunks = count_of(pipeline.chunks, "micro-batch", "micro-batches")
    words = [f"{count_of(pipeline.partitions, 'partition')}{where}, {chunks}"]
    words += [facts.schedule] if facts.schedule else []
    words += [f"balance {list(facts.balance)}"] if facts.balance and len(facts.balance) <= 16 else []
    words += [f"checkpoint {facts.checkpoint}"] if facts.checkpoint else []
    words += [f"batch {facts.batch_size}"] if facts.batch_size else []
    words += [count_of(pipeline.replicas, "replica")] if pipeline.replicas > 1 else []
    return ", ".join(words)


def _verdict(report: Report, style: Style) -> list[str]:
    lines = [style.paint(line, "bold") for line in style.wrapped(report.verdict.text)]
    changes = report.verdict.changes
    if changes:
        title = f"What would help{' (each on its own)' * (len(changes) > 1)}, and the effect on the step time:"
        lines += ["", *style.wrapped(title)]
    table = [[c.promise, f"{_minus(style)}{c.gain:.0%}"] for c in changes]
    gains = columns(table, align="lr") if table else []
    room = max(map(len, gains), default=0)
    for change, gain in zip(changes, gains, strict=True):
        first, *more = style.wrapped(change.what, indent=" " * (room + 4))
        lines += [f"  {style.paint(gain, 'green', 'bold')}  {first.lstrip()}", *more]
        lines += [style.paint(line, "dim") for line in style.wrapped(change.why, indent=" " * (room + 4))]
    return lines


def _minus(style: Style) -> str:
    return "-" if style.ascii else "\N{MINUS SIGN}"


def _speed(report: Report, overall: Overall, style: Style) -> list[str]:
    dash = "-" if style.ascii else "\N{EN DASH}"
    spread = f", p10{dash}p90 {time(overall.time.low)}{dash}{time(overall.time.high)}" if overall.steps > 1 else ""
    rows = [
        ["Step time", time(overall.time.median), f"median of {count_of(overall.steps, 'step')}{spread}"],
        ["Throughput", *_throughput(overall)],
        ["Bubble", percent(overall.bubble), _bubble_note(overall, dash)],
        ["Schedule", percent(overall.bound), "bubble of the schedule alone, without other losses"],
    ]
    if overall.recompute > 0:
        rows.append(["Recompute", percent(overall.recompute), "of computing time"])
    lines = _noted(rows, style)
    if overall.steps >= FEW:
        lines += _each_step(report, style)
    if (left := warm_up_in(report)) is not None:
        lines += [style.paint(line, "dim") for line in style.wrapped(left.text, indent="  ", first="")]
    return lines


def _noted(rows: Sequence[Sequence[str]], style: Style) -> list[str]:
    """Lay out names and numbers, each with a note beside it, in as many lines as that takes."""
    lines = []
    for head, (*_, note) in zip(columns([row[:2] for row in rows], align="lr"), rows, strict=True):
        lines += style.wrapped(note, indent=" " * (len(head) + 2), first=f"{head}  ")
    return lines


def _each_step(report: Report, style: Style) -> list[str]:
    """Draw the time and the bubble of every step as columns, each of several steps where there are many."""
    chosen = report.steps.where(report.counted)
    numbers, which = np.unique(chosen.step, return_inverse=True)
    times, bubbles = np.zeros(len(numbers)), np.zeros(len(numbers))
    np.maximum.at(times, which, chosen.period)
    np.maximum.at(bubbles, which, chosen.bubble)
    room = style.width - 34
    rows = [
        [
            "Each step",
            "time",
            spark(times.tolist(), room, top=times.max(), ascii=style.ascii),
            f"to {time(times.max())}",
        ],
        ["", "bubble", spark(bubbles.tolist(), room, top=1.0, ascii=style.ascii), f"to {percent(bubbles.max())}"],
    ]
    return columns(rows, align="lrll")


def _bubble_note(overall: Overall, dash: str) -> str:
    low, high = overall.bubbles.low, overall.bubbles.high
    spread = f"; p10{dash}p90 {low:.1%}{dash}{high:.1%}" if overall.steps > 1 else ""
    return f"idle share of all windows{spread}"


def _throughput(overall: Overall) -> tuple[str, str]:
    rates = [f"{rate(overall.steps_per_second)} steps/s", f"{rate(overall.microbatches_per_second)} micro-batches/s"]
    if overall.samples_per_second is not None:
        rates.insert(0, f"{rate(overall.samples_per_second)} samples/s")
    return rates[0], f"over {time(overall.elapsed)} including pauses; {rates[1]}"


def _where(overall: Overall, style: Style) -> list[str]:
    """Draw the parts of the mean step as bars: inside of the pipeline, then outside."""
    total = max(sum(overall.parts.values()), 1e-9)
    inside = ["computing", *(name for name in LOSSES if overall.parts[name] >= total * 0.0005)]
    outside = [name for name in OUTSIDE if overall.parts[name] >= total * 0.0005]
    room = max(12, min(40, style.width // 2 - 36 if style.width >= 120 else style.width - 42))
    widest = max(overall.parts.values())
    rows = []
    for name in (*inside, *outside):
        share = overall.parts[name] / total
        colour = "green" if name == "computing" else "yellow" if name in LOSSES else "magenta"
        drawn = bar(overall.parts[name] / widest, room, ascii=style.ascii)
        rows.append([f"  {TITLES[name]}", time(overall.parts[name]), percent(share), style.paint(drawn, colour)])
        if name == "host_gaps" and overall.turnaround >= total * 0.005:
            rows.append(["    before backward", time(overall.turnaround), percent(overall.turnaround / total), ""])
    rows.append(["  mean step", time(total), "100%", ""])
    lines = columns(rows, align="lrrl")
    lines[-1] = style.paint(lines[-1], "dim")
    return [style.paint("Where the time goes (shares of the mean step)", "bold"), *lines]


def _partitions(pipeline: PipelineReport, report: Report, style: Style) -> list[str]:
    window = max(pipeline.window.mean, 1e-9)
    rows, left = _worst(pipeline.rows)
    title = f"Partitions (shares of the mean window, {time(window)})"
    if len(report.pipelines) > 1:
        batches = count_of(pipeline.minibatches, "mini-batch", "mini-batches")
        title += f" of {batches} through {count_of(pipeline.partitions, 'partition')}"
    losses = [name for name in LOSSES if any(row.losses[name] >= window * 0.0005 for row in pipeline.rows)]
    phases = list(rows[0].phases) if style.width >= 110 and rows else []
    facts = ["device"] * any(row.device is not None for row in rows) + ["rank"] * (len(report.ranks) > 1)
    table = _partition_table(rows, window, facts, phases, {name: _SHORT[name] for name in losses}, style)
    if max(map(shown_width, table)) > style.width:
        table = _partition_table(rows, window, facts[1:], phases, {name: _SHORTEST[name] for name in losses}, style)
    if max(map(shown_width, table)) > style.width:  # in two parts
        half = (len(losses) + 1) // 2
        parts = [{name: _SHORTEST[name] for name in some} for some in (losses[:half], losses[half:])]
        table = [line for part in parts for line in _partition_table(rows, window, (), (), part, style)]
    lines = [style.paint(title, "bold"), *table]
    if left:
        lines.append(style.paint(f"  and {left} more, with bubbles in between", "dim"))
    if pipeline.workers < pipeline.partitions:
        text = (
            "Partitions on one rank take turns, so each is idle longer than its rank; the bubble above is the rank's."
        )
        lines += [style.paint(line, "dim") for line in style.wrapped(text, indent="  ")]
    return lines


def _partition_table(
    rows: Sequence[PartitionReport],
    window: float,
    facts: Sequence[str],
    phases: Sequence[str],
    losses: Mapping[str, str],
    style: Style,
) -> list[str]:
    table = [[style.paint(cell, "dim") for cell in ("partition", *facts, *phases, "busy", "bubble", *losses.values())]]
    for row in rows:
        known = {"device": row.device or "", "rank": ",".join(map(str, row.ranks))}
        cells = [str(row.partition), *(style.cut(known[name], 12) for name in facts)]
        cells += [_time(row.phases.get(name, 0.0)) for name in phases]
        cells += [time(row.busy), style.paint(percent(row.bubble), "bold")]
        table.append([*cells, *(percent(row.losses[name] / window) for name in losses)])
    align = "l" * (1 + len(facts)) + "r" * (len(phases) + 2 + len(losses))
    return [f"  {line}" for line in columns(table, align=align)]


def _worst(rows: Sequence[PartitionReport]) -> tuple[list[PartitionReport], int]:
    if len(rows) <= PARTITIONS:
        return list(rows), 0
    by_bubble = sorted(rows, key=lambda row: row.bubble)
    kept = {row.partition for row in (*by_bubble[: PARTITIONS // 2], *by_bubble[-PARTITIONS // 2 :])}
    return [row for row in rows if row.partition in kept], len(rows) - len(kept)


def _layers(report: Report, style: Style) -> list[str]:
    slowest = sorted(report.layers, key=lambda layer: -layer.total)
    shown = slowest[:LAYERS]
    recomputed = any(layer.runs[1] for layer in shown)
    head = ["layer", "partition", "forward", *["recompute"] * recomputed, "backward", "share"]
    table = [[style.paint(cell, "dim") for cell in head]]
    room = max(12, min(32, style.width - 56))
    for layer in shown:
        cells = [style.cut(layer.name, room), str(layer.partition), _time(layer.forward)]
        cells += [_time(layer.recompute)] if recomputed else []
        table.append([*cells, _time(layer.backward), percent(layer.share)])
    more = len(slowest) - len(shown)
    title = "Slowest layers (time per micro-batch)" if more else "Layers (time per micro-batch)"
    lines = [style.paint(title, "bold"), *(f"  {line}" for line in columns(table, align="l" + "r" * (len(head) - 1)))]
    if more:
        rest = percent(sum(layer.share for layer in slowest[LAYERS:]))
        lines.append(style.paint(f"  and {count_of(more, 'more layer')}, {rest}", "dim"))
    return lines


def _time(microseconds: float) -> str:
    """Write a time, or a dash for what never ran."""
    return time(microseconds) if microseconds > 0 else "-"


def _timeline(report: Report, step: int, style: Style) -> list[str]:
    glyphs = Glyphs.ascii() if style.ascii else Glyphs()
    timeline = draw_step(report, step, width=style.width - 12, glyphs=glyphs)
    label = max(len(text) for text in timeline.labels)
    there = {phase for phases in timeline.phases for phase in phases}
    recompute = "R recompute, " if RECOMPUTE in there else ""
    backward = "B and W backward" if WEIGHT in there else "B backward"
    whose = " of the rank" if report.taking_turns else ""
    legend = f"F forward, {recompute}{backward}; right: bubble{whose}"
    which = f" of replica {DRAWN}" if len({*report.replicas.values()}) > 1 else ""
    title = f"Step {step}{which}, window {time(timeline.end - timeline.begin)}"
    head = [style.paint(title, "bold"), style.paint(legend, "dim")]
    lines = ["   ".join(head)] if len(title) + len(legend) + 3 <= style.width else head
    shown = list(zip(timeline.labels, timeline.lines, timeline.phases, timeline.bubbles, strict=True))[: 2 * PARTITIONS]
    for name, text, phases, bubble in shown:
        left, right = glyphs.edges
        share = percent(bubble) if bubble is not None else ""
        lines.append(f"  {name:>{label}} {left}{coloured(text, phases, style)}{right} {share:>6}".rstrip())
    if len(timeline.labels) > len(shown):
        more = count_of(len(timeline.labels) - len(shown), "more partition")
        lines.append(style.paint(f"  and {more}", "dim"))
    return [*lines, *(style.paint(line, "dim") for line in _parts_of(report, step, style))]


def _parts_of(report: Report, step: int, style: Style) -> list[str]:
    """Say where the time of one step went."""
    rows = np.flatnonzero(report.steps.step == step)
    if not len(rows):
        return []
    parts, period = report.steps.parts[:, rows[0]], max(float(report.steps.period[rows[0]]), 1e-9)
    named = [
        f"{TITLES[name]} {percent(p / period)}" for name, p in zip(PARTS, parts, strict=True) if p >= period * 0.005
    ]
    text = f"The whole step takes {time(period)}: {', '.join(named)}."
    return style.wrapped(text, indent="  ")


def _findings(title: str, findings: Sequence[Finding], most: int, style: Style) -> list[str]:
    lines = [style.paint(title, "bold")]
    for finding in findings[:most]:
        lines += style.wrapped(finding.text, indent="    ", first="  ")
    if len(findings) > most:
        lines.append(style.paint(f"  and {len(findings) - most} more", "dim"))
    return lines


def _names(report: Report, style: Style) -> list[str]:
    total = max(sum(name.total for name in report.names), 1)
    table = [[style.paint(cell, "dim") for cell in ("category", "name", "count", "time", "share")]]
    for name in report.names[:20]:
        cells = [style.cut(name.category, 16), style.cut(name.name, max(20, style.width - 50))]
        table.append([*cells, f"{name.count:,}", time(name.total), percent(name.total / total)])
    title = "Where the time went (nested spans count twice)"
    return [style.paint(title, "bold"), *(f"  {line}" for line in columns(table, align="llrrr"))]
