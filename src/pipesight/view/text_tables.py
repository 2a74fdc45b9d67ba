"""The tables of a text report: where the time goes, layers, partitions, and names of spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipesight._formatting import percent, time
from pipesight._plurals import count_of
from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.critical_path import CriticalPath
from pipesight.analysis.overall import Overall
from pipesight.analysis.own_spans import OwnTime
from pipesight.analysis.pipeline_report import PartitionReport, PipelineReport
from pipesight.analysis.report import Report
from pipesight.analysis.step_times import OUTSIDE
from pipesight.analysis.verdict import TITLES
from pipesight.view.text_layout import NAMED, Style, bar, columns, shown_width

__all__ = [
    "PARTITIONS",
    "gpu_table",
    "layer_table",
    "name_table",
    "partition_table",
    "path_lines",
    "profiled_table",
    "time_bars",
]

LAYERS = 8
"""How many of the slowest layers are listed."""
PARTITIONS = 16
"""How many partitions are listed; of more, those with the largest and the smallest bubbles."""
NAMES = 20
"""How many names of spans are listed."""

_SHORT = {**TITLES, "fill_and_drain": "fill", "sharing": "sharing", "transfers": "transfer", "host_gaps": "host gap"}
_SHORTEST = {"fill_and_drain": "fill", "sharing": "share", "imbalance": "imbal."}
_SHORTEST |= {"jitter": "jitter", "transfers": "transf.", "host_gaps": "gaps"}


def time_bars(overall: Overall, style: Style, own: Sequence[OwnTime] = ()) -> list[str]:
    """Draw the parts of the mean step as bars: inside the pipeline, then outside, with what the user's spans cover."""
    total = max(sum(overall.parts.values()), 1e-9)
    inside = ["computing", *(name for name in LOSSES if overall.parts[name] >= total * 0.0005)]
    outside = [name for name in OUTSIDE if overall.parts[name] >= total * 0.0005]
    room = max(2, min(40, style.width // 2 - 36 if style.width >= 120 else style.width - 42))
    widest = max(overall.parts.values())
    rows = []
    for name in (*inside, *outside):
        share = overall.parts[name] / total
        colour = "green" if name == "computing" else "yellow" if name in LOSSES else "magenta"
        drawn = bar(overall.parts[name] / widest, room, ascii=style.ascii)
        rows.append([f"  {TITLES[name]}", time(overall.parts[name]), percent(share), style.paint(drawn, colour)])
        if name == "host_gaps" and overall.turnaround >= total * 0.005:
            rows.append(["    before backward", time(overall.turnaround), percent(overall.turnaround / total), ""])
        for span in own:
            if span.part == name and span.time >= total * 0.0005:
                deeper = "      " if name == "host_gaps" else "    "
                rows.append([f"{deeper}{style.plain(span.name)}", time(span.time), percent(span.time / total), ""])
    rows.append(["  mean step", time(total), "100%", ""])
    lines = columns(rows, align="lrrl", names=NAMED)
    lines[-1] = style.paint(lines[-1], "dim")
    return [style.paint("Where the time goes (shares of the mean step)", "bold"), *lines]


def layer_table(report: Report, style: Style) -> list[str]:
    """List the slowest layers."""
    slowest = sorted(report.layers, key=lambda layer: -layer.total)
    shown = slowest[:LAYERS]
    recomputed = any(layer.runs[1] for layer in shown)
    head = ["layer", "partition", "forward", *["recompute"] * recomputed, "backward", "share"]
    table = [[style.paint(cell, "dim") for cell in head]]
    room = max(12, min(32, style.width - 56))
    for layer in shown:
        cells = [style.plain(layer.name), str(layer.partition), _time(layer.forward)]
        cells += [_time(layer.recompute)] if recomputed else []
        table.append([*cells, _time(layer.backward), percent(layer.share)])
    more = len(slowest) - len(shown)
    title = "Slowest layers (time per micro-batch)" if more else "Layers (time per micro-batch)"
    laid = columns(table, align="l" + "r" * (len(head) - 1), names=room, width=style.width - 2)
    lines = [style.paint(title, "bold"), *(f"  {line}" for line in laid)]
    if more:
        rest = percent(sum(layer.share for layer in slowest[LAYERS:]))
        lines.append(style.paint(f"  and {count_of(more, 'more layer')}, {rest}", "dim"))
    return lines


def partition_table(pipeline: PipelineReport, report: Report, style: Style) -> list[str]:
    """List the partitions of a pipeline, with their losses: in shorter words, or below each other, in narrow lines."""
    window = max(pipeline.window.mean, 1e-9)
    rows, left = _worst(pipeline.rows)
    title = f"Partitions (shares of the mean window, {time(window)})"
    if len(report.pipelines) > 1:
        batches = count_of(pipeline.minibatches, "mini-batch", "mini-batches")
        title += f" of {batches} through {count_of(pipeline.partitions, 'partition')}"
    losses = [name for name in LOSSES if any(row.losses[name] >= window * 0.0005 for row in pipeline.rows)]
    phases = list(rows[0].phases) if style.width >= 110 and rows else []
    facts = ["device"] * any(row.device is not None for row in rows) + ["rank"] * (len(report.ranks) > 1)
    table = _rows(rows, window, facts, phases, {name: _SHORT[name] for name in losses}, style)
    if max(map(shown_width, table)) > style.width:
        table = _rows(rows, window, facts, phases, {name: _SHORTEST[name] for name in losses}, style, short=True)
    lines = [style.paint(title, "bold"), *table]
    if left:
        lines.append(style.paint(f"  and {left} more, with bubbles in between", "dim"))
    if pipeline.workers < pipeline.partitions:
        text = (
            "Partitions on one rank take turns, so each is idle longer than its rank; the bubble above is the rank's."
        )
        lines += [style.paint(line, "dim") for line in style.wrapped(text, indent="  ")]
    return lines


def _rows(
    rows: Sequence[PartitionReport],
    window: float,
    facts: Sequence[str],
    phases: Sequence[str],
    losses: Mapping[str, str],
    style: Style,
    *,
    short: bool = False,
) -> list[str]:
    table = [[style.paint(cell, "dim") for cell in ("partition", *facts, *phases, "busy", "bubble", *losses.values())]]
    for row in rows:
        known = {"device": row.device or "", "rank": ",".join(map(str, row.ranks))}
        cells = [str(row.partition), *(style.cut(known[name], 12) for name in facts)]
        cells += [_time(row.phases.get(name, 0.0)) for name in phases]
        cells += [time(row.busy), style.paint(percent(row.bubble), "bold")]
        table.append([*cells, *(percent(row.losses[name] / window) for name in losses)])
    align = "l" * (1 + len(facts)) + "r" * (len(phases) + 2 + len(losses))
    return [f"  {line}" for line in columns(table, align=align, width=style.width - 2 if short else None)]


def _worst(rows: Sequence[PartitionReport]) -> tuple[list[PartitionReport], int]:
    if len(rows) <= PARTITIONS:
        return list(rows), 0
    by_bubble = sorted(rows, key=lambda row: row.bubble)
    kept = {row.partition for row in (*by_bubble[: PARTITIONS // 2], *by_bubble[-PARTITIONS // 2 :])}
    return [row for row in rows if row.partition in kept], len(rows) - len(kept)


def path_lines(path: CriticalPath | None, style: Style) -> list[str]:
    """Sum up the critical path of a step, the largest part first."""
    if path is None or not path.parts:
        return []
    whole = path.parts[-1].end
    parts = sorted(path.totals().items(), key=lambda part: -part[1])
    text = ", ".join(f"{kind} {time(spent)} ({percent(spent / max(whole, 1e-9))})" for kind, spent in parts)
    until = "the next step" if path.follows else "its last operation"
    title = f"Critical path of step {path.step}, from its first task to {until}: {time(whole)}"
    return [
        *(style.paint(line, "bold") for line in style.wrapped(title)),
        *style.wrapped(text, indent="  ", first="  "),
    ]


def gpu_table(report: Report, style: Style) -> list[str]:
    """List what the GPU of each rank did, of a trace of PyTorch's profiler."""
    if not report.gpus:
        return []
    titles = ("rank", "compute", "communic.", "exposed", "memory", "idle", "gaps", "longest")
    table = [[style.paint(cell, "dim") for cell in titles]]
    for gpu in report.gpus[:PARTITIONS]:
        parts = (gpu.compute, gpu.communication, gpu.exposed_communication, gpu.memory, gpu.idle)
        shares = [percent(part / max(gpu.window, 1)) for part in parts]
        table.append([str(gpu.rank), *shares, f"{gpu.gaps:,}", time(gpu.longest_gap)])
    if len(report.gpus) > PARTITIONS:
        table.append([f"and {len(report.gpus) - PARTITIONS} more", *[""] * 7])
    window = max(gpu.window for gpu in report.gpus)
    title = f"GPUs (shares of the time from first to last kernel, {time(window)} at most)"
    return [
        style.paint(title, "bold"),
        *(f"  {line}" for line in columns(table, align="lrrrrrrr", width=style.width - 2)),
    ]


def profiled_table(report: Report, style: Style) -> list[str]:
    """List the steps of a trace of PyTorch's profiler that has no tasks."""
    if not report.profiled or report.overall is not None:
        return []
    table = [[style.paint(cell, "dim") for cell in ("rank", "steps", "count", "median", "shortest", "longest")]]
    for steps in report.profiled[:PARTITIONS]:
        times = [time(value) for value in (steps.median, steps.least, steps.most)]
        table.append([str(steps.rank), f"{steps.first} to {steps.last}", f"{steps.count:,}", *times])
    if len(report.profiled) > PARTITIONS:
        table.append([f"and {len(report.profiled) - PARTITIONS} more", *[""] * 5])
    title = "Steps, as the profiler was told of them"
    return [
        style.paint(title, "bold"),
        *(f"  {line}" for line in columns(table, align="llrrrr", width=style.width - 2)),
    ]


def name_table(report: Report, style: Style) -> list[str]:
    """List the spans of a trace without tasks, by name."""
    total = max(sum(name.total for name in report.names), 1)
    table = [[style.paint(cell, "dim") for cell in ("category", "name", "count", "time", "share")]]
    for name in report.names[:NAMES]:
        cells = [style.cut(name.category, 16), style.cut(name.name, max(20, style.width - 50))]
        table.append([*cells, f"{name.count:,}", time(name.total), percent(name.total / total)])
    title = "Where the time went (nested spans count twice)"
    return [style.paint(title, "bold"), *(f"  {line}" for line in columns(table, align="llrrr"))]


def _time(microseconds: float) -> str:
    """Write a time, or a dash for what never ran."""
    return time(microseconds) if microseconds > 0 else "-"
