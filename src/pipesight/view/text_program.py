"""The text of a program without a pipeline: its speed, a drawn step, where the time goes, modules, spans and curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipesight._formatting import percent, rate, size, time
from pipesight._plurals import count_of
from pipesight.analysis.pipelining_lead import PipeliningLead
from pipesight.analysis.program_report import ProgramReport
from pipesight.analysis.program_time import OWN, part_title
from pipesight.analysis.report import Report
from pipesight.runs.format import STOPPED
from pipesight.view.finding_sentences import numbers
from pipesight.view.text_layout import NAMED, Style, bar, columns, shown_width, spark

__all__ = ["curve_lines", "own_span_table", "program_blocks", "step_lines"]

MODULES = 10
"""How many of the slowest modules are listed."""
SPANS = 8
"""How many spans of the user's own are listed; so many curves, too."""
LEAST = 0.0005
"""Parts below this share of the step are not listed."""

_LETTERS = {
    "data_loading": "d",
    "forward": "F",
    "loss": "l",
    "recompute": "R",
    "backward": "B",
    "optimizer": "o",
    "communication": "c",
    "checkpoints": "s",
    "copies": "m",
    "evaluation": "e",
    "between": ".",
}
_BESIDE = "="
"""What runs beside the main thread."""
_COLOURS = {"forward": "green", "recompute": "yellow", "backward": "cyan", "loss": "green"}


def program_blocks(report: Report, program: ProgramReport, style: Style, *, step: int | None) -> list[list[str]]:
    """Return the blocks between the verdict and the findings; ``ValueError`` if there is no such step."""
    drawn = program.typical if step is None else step
    return [
        _speed(program, style),
        step_lines(program, drawn, style),
        part_bars(program, style),
        module_table(program, style),
        own_span_table(report, style),
        curve_lines(report, style),
        lead_lines(report.lead, style),
    ]


def _speed(program: ProgramReport, style: Style) -> list[str]:
    dash = "-" if style.ascii else "\N{EN DASH}"
    times = program.time
    spread = f", p10{dash}p90 {time(times.low)}{dash}{time(times.high)}" if program.count > 1 else ""
    what = "step" if program.trains else "batch"
    often = count_of(program.count, what, "batches" if what == "batch" else None)
    per_second = f"{rate(program.count / program.elapsed * 1e6)} {'steps' if program.trains else 'batches'}/s"
    samples = program.samples_per_second
    fast = per_second if samples is None else f"{rate(samples)} samples/s"
    rows = [
        [f"{what.capitalize()} time", time(times.median), f"median of {often}{spread}"],
        ["Throughput", fast, f"over {time(program.elapsed)}{'' if samples is None else f'; {per_second}'}"],
    ]
    lines = []
    for head, (*_, note) in zip(columns([row[:2] for row in rows], align="lr"), rows, strict=True):
        lines += style.wrapped(note, indent=" " * (len(head) + 2), first=f"{head}  ")
    counted, period = program.steps.where(program.counted).by_step()
    if len(counted) >= 4:
        drawn = spark(period.tolist(), style.width - 34, top=period.max(), ascii=style.ascii)
        lines += columns([[f"Each {what}", "time", drawn, f"to {time(period.max())}"]], align="lrll")
    if program.warm_up:
        slow = f"Excluded as warm-up: {numbers(program.warm_up)}, much slower than the rest."
        lines += [style.paint(line, "dim") for line in style.wrapped(slow, indent="  ", first="")]
    return lines


def step_lines(program: ProgramReport, number: int, style: Style, *, most: int | None = None) -> list[str]:
    """Draw a step, a line a rank, a letter for what takes most of a cell's time; ``ValueError`` without it.

    Of at most so many lines, the legend gets some only if all of it fits.
    """
    steps = program.all_steps
    rows = np.flatnonzero(steps.step == number)
    if not len(rows):
        raise ValueError(
            f"no step {number} was recorded (recorded: {int(steps.step.min())} to {int(steps.step.max())})"
        )
    begin, end = int(steps.begin[rows].min()), int(steps.end[rows].max())
    room = max(style.width - 12, 20)
    left, right = ("|", "|") if style.ascii else ("│", "│")
    lines = [style.paint(f"Step {number}, {time(end - begin)}", "bold")]
    seen: dict[str, str] = {}
    in_background = False
    for row in rows.tolist():
        rank = int(steps.rank[row])
        cells = _cells(program, rank, number, begin, end, room, seen)
        text = "".join(style.paint(_letter(part, seen, style), _colour(part)) for part in cells)
        lines.append(f"  {f'r{rank}' if program.ranks > 1 else '':>4} {left}{text}{right}")
        if (beside := _beside(program, rank, begin, end, room)) is not None:
            lines.append(f"       {left}{style.paint(beside, 'magenta')}{right}")
            in_background = True
    legend = ", ".join(f"{_letter(part, seen, style)} {part_title(part)}" for part in seen)
    if in_background:
        legend += f", {_BESIDE} collective in the background"
    below = [style.paint(line, "dim") for line in style.wrapped(legend, indent="  ")]
    return [*lines, *below] if most is None or len(lines) + len(below) <= most else lines[:most]


def _beside(program: ProgramReport, rank: int, begin: int, end: int, room: int) -> str | None:
    """Draw the collectives that run in the background of a rank; ``None`` if there are none."""
    beside = program.background
    rows = np.flatnonzero((beside.rank == rank) & (beside.begin < end) & (beside.end > begin))
    if not len(rows):
        return None
    edges, time_in = np.linspace(begin, end, room + 1), np.zeros(room)
    for row in rows.tolist():
        time_in += np.clip(np.minimum(edges[1:], beside.end[row]) - np.maximum(edges[:-1], beside.begin[row]), 0, None)
    return "".join(_BESIDE if spent > (end - begin) / room / 2 else " " for spent in time_in.tolist())


def _cells(
    program: ProgramReport, rank: int, number: int, begin: int, end: int, room: int, seen: dict[str, str]
) -> list[str]:
    """Return what takes most of each cell: every moment belongs to the innermost span."""
    pieces, edges = program.pieces[rank], np.linspace(begin, end, room + 1)
    own = program.all_steps.where(program.all_steps.rank == rank)
    names = ["between"]
    time_in = [np.zeros(room)]
    inside = np.flatnonzero(own.step[pieces.step] == number)
    covers: dict[int, np.ndarray] = {}
    for row in inside.tolist():
        span = np.clip(
            np.minimum(edges[1:], pieces.spans.end[row]) - np.maximum(edges[:-1], pieces.spans.begin[row]), 0, None
        )
        covers[row] = span
        part = pieces.part[row]
        if part not in names:
            names.append(part)
            time_in.append(np.zeros(room))
        time_in[names.index(part)] += span
        outer = int(pieces.outer[row])
        if outer in covers:
            time_in[names.index(pieces.part[outer])] -= span
    rest = np.diff(edges) - np.sum([covers[row] for row in covers if int(pieces.outer[row]) not in covers], axis=0)
    time_in[0] += rest
    most = np.argmax(np.round(np.stack(time_in), 3), axis=0)
    for place in most.tolist():
        seen.setdefault(names[place], "")
    return [names[place] for place in most.tolist()]


def _letter(part: str, seen: dict[str, str], style: Style) -> str:
    if part == "between" and not style.ascii:
        return "·"
    if not part.startswith(OWN):
        return _LETTERS[part]
    own = [name for name in seen if name.startswith(OWN)]
    return "123456789*"[min(own.index(part), 9)]


def _colour(part: str) -> str:
    return "dim" if part == "between" else "yellow" if part.startswith(OWN) else _COLOURS.get(part, "magenta")


def part_bars(program: ProgramReport, style: Style) -> list[str]:
    """Draw the parts of the mean step as bars."""
    total = max(sum(program.parts.values()), 1e-9)
    shown = {part: spent for part, spent in program.parts.items() if spent >= total * LEAST}
    widest = max(shown.values(), default=1.0)
    room = max(2, min(40, style.width - 44))
    rows = []
    for part, spent in shown.items():
        drawn = bar(spent / widest, room, ascii=style.ascii)
        name = style.plain(part_title(part))
        rows.append([f"  {name}", time(spent), percent(spent / total), style.paint(drawn, _colour(part))])
    what = "step" if program.trains else "batch"
    rows.append([f"  mean {what}", time(total), "100%", ""])
    lines = columns(rows, align="lrrl", names=NAMED)
    lines[-1] = style.paint(lines[-1], "dim")
    return [style.paint(f"Where the time goes (shares of the mean {what})", "bold"), *lines]


def module_table(program: ProgramReport, style: Style) -> list[str]:
    """List the modules that take most time alone."""
    found = program.modules
    if not found.modules:
        return []
    shown = found.modules[:MODULES]
    recomputed = any(module.recompute for module in shown)
    head = ["module", "class", "calls", "forward", *["recompute"] * recomputed, "backward", "share"]
    table = [[style.paint(cell, "dim") for cell in head]]
    several = len({module.model for module in found.modules}) > 1
    for module in shown:
        same = sum(other.name == module.name for other in found.modules) > 1
        name = f"{module.model}: {module.name}" if several and same else module.name
        cells = [style.plain(name), style.plain(module.type), f"{module.calls:g}"]
        cells += [time(module.forward), *[time(module.recompute)] * recomputed]
        table.append([*cells, time(module.backward), percent(module.share)])
    others = sum(max(shown_width(row[k]) for row in table) + 2 for k in range(1, len(head)))
    room = max(12, min(40, style.width - 2 - others))
    laid = columns(table, align="ll" + "r" * (len(head) - 2), names=room, width=style.width - 2)
    where = f"in each alone; of {count_of(found.steps, 'step')} that show all modules"
    title = style.wrapped(f"Slowest modules ({where})")
    lines = [*(style.paint(line, "bold") for line in title), *(f"  {line}" for line in laid)]
    if more := found.modules[MODULES:]:
        rest = f"  and {count_of(len(more), 'more module')}, {percent(sum(module.share for module in more))}"
        lines.append(style.paint(rest, "dim"))
    return lines


def own_span_table(report: Report, style: Style) -> list[str]:
    """List the spans and the instants that the user recorded."""
    instants = _instants(report, style)
    if not report.own_spans:
        return instants
    table = [[style.paint(cell, "dim") for cell in ("span", "spans", "time", "mean", "longest")]]
    for span in report.own_spans[:SPANS]:
        mean = span.total / max(span.count, 1)
        name = style.plain(span.name)
        table.append([name, f"{span.count:,}", time(span.total), time(mean), time(span.longest)])
    lines = [style.paint("Your spans (with what is inside)", "bold")]
    laid = columns(table, align="lrrrr", names=max(12, style.width - 46), width=style.width - 2)
    lines += [f"  {line}" for line in laid]
    if len(report.own_spans) > SPANS:
        lines.append(style.paint(f"  and {len(report.own_spans) - SPANS} more", "dim"))
    return [*lines, *instants]


def _instants(report: Report, style: Style) -> list[str]:
    steps: dict[str, list[int]] = {}
    for moment in report.moments:
        own = steps.setdefault(moment.name, [])
        if moment.step not in own:
            own.append(moment.step)
    stopped = steps.pop(STOPPED, None)
    shown = [f"{style.plain(name)} in {numbers(own)}" for name, own in [*steps.items()][:SPANS]]
    more = f", and {len(steps) - SPANS} more" if len(steps) > SPANS else ""
    lines = style.wrapped(f"Your instants: {', '.join(shown)}{more}", indent="  ", first="") if shown else []
    if stopped is not None:
        why = "by a signal, a debugger, its container, or for want of a processor"
        lines += style.wrapped(f"The process was stopped in {numbers(stopped)}: {why}", indent="  ", first="")
    return lines


def curve_lines(report: Report, style: Style) -> list[str]:
    """Draw each counter over steps, with its first and its last value."""
    if not report.curves:
        return []
    rows = []
    names = max(13, min(24, style.width - 56))
    for curve in report.curves[:SPANS]:
        finite = [value for value in curve.values if np.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        above = [max(value - low, 0.0) if np.isfinite(value) else 0.0 for value in curve.values]
        drawn = spark(above, max(8, style.width - names - 30), top=(high - low) or 1.0, ascii=style.ascii)
        rows.append([f"  {style.plain(curve.name)}", drawn, _value(curve.values[0]), "->", _value(curve.values[-1])])
    lines = [
        style.paint("Curves over steps (first -> last)", "bold"),
        *columns(rows, align="llrlr", gap=1, names=names + 2),
    ]
    if len(report.curves) > SPANS:
        lines.append(style.paint(f"  and {len(report.curves) - SPANS} more", "dim"))
    return lines


def _value(value: float) -> str:
    return f"{value:.4g}"


def lead_lines(lead: PipeliningLead | None, style: Style) -> list[str]:
    """Say what a pipeline would give."""
    if lead is None:
        return []
    return [style.paint("As a pipeline", "bold"), *style.wrapped(lead_text(lead), indent="  ")]


def lead_text(lead: PipeliningLead) -> str:
    """Return what a pipeline would give, in sentences."""
    if lead.refusal is not None:
        return f"No plan for {lead.model}: {lead.refusal}."
    largest = max(lead.parameter_bytes)
    faster = lead.recorded / max(lead.step, 1e-9)
    parts = count_of(lead.partitions, "partition")
    return (
        f"{lead.model} can be cut at {_listed(lead.units)}. {parts} on as many devices, {lead.chunks} micro-batches, "
        f"would give steps of at least {time(lead.step)} instead of {time(lead.recorded)} (at most {faster:.2f} times "
        f"as fast, bubble {percent(lead.bubble)}), if micro-batches take time in proportion and transfers take none. "
        f"Parameters: at most {size(largest)} a device instead of {size(sum(lead.parameter_bytes))}, gradients as much "
        f"again; activations were not measured (pipesight plan --model measures them). "
        f"Pipeline(model, cuts={_code(lead.cuts)}, devices=..., chunks={lead.chunks})"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} modules)"


def _code(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
