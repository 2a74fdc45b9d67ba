"""A report as text for the terminal: the verdict first, then the numbers, then what they come from."""

from __future__ import annotations

from collections.abc import Sequence

from pipesight._formatting import percent, rate, time
from pipesight._plurals import count_of
from pipesight.analysis.overall import Overall
from pipesight.analysis.pipeline_report import PipelineReport
from pipesight.analysis.report import Report
from pipesight.view.finding_sentences import Finding, finding_groups, nonfinite_in, remarks_in, warm_up_in
from pipesight.view.text_layout import LEAST, Style, beside, columns, spark
from pipesight.view.text_log import log_blocks
from pipesight.view.text_memory import memory_block
from pipesight.view.text_program import curve_lines, own_span_table, program_blocks
from pipesight.view.text_tables import (
    PARTITIONS,
    gpu_table,
    layer_table,
    name_table,
    partition_table,
    path_lines,
    profiled_table,
    time_bars,
)
from pipesight.view.text_timeline import timeline_block
from pipesight.view.text_what_if import what_if_block

__all__ = ["render"]

FEW = 4
"""With fewer steps than this, they are not drawn one by one."""
MOST = {"Stragglers": 5, "Waits for one rank": 5, "Links": 8, "Collectives": 5, "Messages": 1, "Remarks": 10}
"""How many findings are listed under each heading."""


def render(
    report: Report, *, width: int = 80, step: int | None = None, colour: bool = False, ascii: bool = False
) -> str:
    """Write a report as text that is at most ``width`` columns wide.

    Args:
        report: What `analyse` returns.
        width: At least 40.
        step: The step to draw; by default, a typical one.
        colour: Whether to use the escape codes for it.
        ascii: Whether to keep to characters that every terminal has.

    Raises:
        ValueError: There is no such step.
    """
    style = Style(max(width, LEAST), colour, ascii)
    blocks = [_head(report, style)]
    if (bad := nonfinite_in(report)) is not None:
        blocks.append([style.paint(line, "red", "bold") for line in style.wrapped(bad.text)])
    blocks.append(_verdict(report, style))
    if report.overall is not None:
        blocks.append(_speed(report, report.overall, style))
    if report.logged is not None:
        blocks += log_blocks(report.logged, style)
    if report.program is not None:
        blocks += program_blocks(report, report.program, style, step=step)
    drawn = report.typical if step is None else step
    if drawn is not None and report.program is None:
        blocks.append(timeline_block(report, drawn, style, most=2 * PARTITIONS))
    if report.overall is not None:
        where = time_bars(report.overall, style, report.own_times)
        if report.layers:
            blocks.append(beside(where, layer_table(report, style), width=style.width))
        else:
            blocks.append(where)
        blocks += [partition_table(pipeline, report, style) for pipeline in report.pipelines]
        blocks.append(path_lines(report.critical_path, style))
    elif report.layers:
        blocks.append(layer_table(report, style))
    if report.memory is not None:
        blocks.append(memory_block(report.memory, style))
    if report.what_if is not None:
        blocks.append(what_if_block(report.what_if, style, is_verdict=report.verdict.text == report.what_if.verdict))
    if report.program is None:
        blocks += [own_span_table(report, style), curve_lines(report, style)]
    blocks += [_findings(title, found, MOST[title], style) for title, found in finding_groups(report)]
    blocks += [profiled_table(report, style), gpu_table(report, style)]
    if report.names:
        blocks.append(name_table(report, style))
    if remarks := remarks_in(report):
        blocks.append(_findings("Remarks", remarks, MOST["Remarks"], style))
    text = (
        "\n\n".join("\n".join(line for whole in block for line in style.folded(whole)) for block in blocks if block)
        + "\n"
    )
    return text.replace("µs", "us") if ascii else text


def _head(report: Report, style: Style) -> list[str]:
    counted = count_of(report.events, "event")
    if report.what_if is not None and not len(report.steps):
        steps = count_of(report.what_if.steps, "step")
        counted = f"{steps}, {count_of(report.what_if.operations, 'operation')}"
    if report.logged is not None:
        counted = f"{count_of(len(report.logged.steps), 'line')} of iterations"
    if report.program is not None:
        what = ("step", None) if report.program.trains else ("batch", "batches")
        counted = f"{count_of(len({*report.program.steps.step.tolist()}), *what)}, {counted}"
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
    where = f" on {count_of(pipeline.workers, pipeline.worker_noun)}" if pipeline.workers < pipeline.partitions else ""
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
    steps = report.steps.where(report.counted).over_replicas()
    times, bubbles = steps.period, steps.bubble
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


def _findings(title: str, findings: Sequence[Finding], most: int, style: Style) -> list[str]:
    lines = [style.paint(title, "bold")]
    for finding in findings[:most]:
        lines += style.wrapped(finding.text, indent="    ", first="  ")
    if len(findings) > most:
        lines.append(style.paint(f"  and {len(findings) - most} more", "dim"))
    return lines
