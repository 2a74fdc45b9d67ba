"""A running training, drawn for a terminal of any size: numbers, the last step, lost time, log lines.

::

    RUN                                                          running for 0:42

    Step        129       42.1 ms   usually 41.8 ms
    Throughput            760 samples/s   usually 766
    Bubble                31.2%   usually 30.9%, schedule alone 27.3%

    Step 129, 38.0 ms                                            bubble  usually
      0 │F0F1F2F3·················B3═══R2B2══R1B1══R0B0══│       31.2%    30.9%
      1 │··F0F1F2F3··········B3═══R2B2══R1B1══R0B0══·····│       31.0%    30.8%

    Where the time goes          last  usually
      computing       26.1 ms   62.0%    62.2%  ██████████████████████████
      fill and drain   9.1 ms   21.6%    21.9%  █████████
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesight._formatting import percent, rate, time
from pipesight._plurals import count_of
from pipesight.analysis.bubble_losses import LOSSES
from pipesight.analysis.latest_step import LatestStep, StepNumbers
from pipesight.analysis.program_time import part_title
from pipesight.analysis.report import Report
from pipesight.analysis.verdict import TITLES
from pipesight.runs.reading.event_codes import PHASES
from pipesight.runs.reading.run import LogLine
from pipesight.view.text_layout import Style, bar, broken
from pipesight.view.text_program import step_lines
from pipesight.view.text_timeline import Glyphs, coloured, draw_step, title_of

__all__ = ["Frame", "draw_frame", "line_of"]

WIDEST = 140
"""The most columns; a timeline gains nothing from more."""
LONGEST_BAR = 60
LONGEST_STATE = 400
"""Characters of how a run ended, which may be the message of an error."""
ROOMY = 20
"""With at least this many lines there is room to explain the bubble; with fewer, long text may be cut off."""
EXPLAINED = "Bubble: idle share of the window, from the first forward to the last backward"
NUMBER = 8  # columns of one
NAME = 22  # columns of the name of a part, at most
COMPUTED = ("computing", "forward", "loss", "recompute", "backward")
"""Parts in which the model computes."""
NOTICEABLE = 0.0005
"""Smaller parts of a step are not drawn."""
_LEVELS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_QUIET = ("DEBUG", "NOTSET")


@dataclass(frozen=True, slots=True)
class Frame:
    """What is drawn at one moment."""

    title: str
    state: str
    report: Report | None = None
    figures: LatestStep | None = None
    log: Sequence[LogLine] = ()


def draw_frame(frame: Frame, *, width: int, height: int, colour: bool = False, ascii: bool = False) -> list[str]:
    """Draw a frame in at most this many columns and lines."""
    style = Style(min(width, WIDEST), colour, ascii)
    report, figures = frame.report, frame.figures
    for wrap in (True, False):
        head = [*_head(frame, style, wrap=wrap), *_warnings(frame, style)]
        numbers = [] if report is None or figures is None else _numbers(figures, style, wrap=wrap)
        if height >= ROOMY or len(head) + len(numbers) <= height // 2 + 1:
            break
    if report is None or figures is None:
        blocks = [head, _log(frame.log, max(height - len(head) - 1, 0), style)]
    else:
        if height >= ROOMY and figures.last.bubble is not None:
            numbers += [style.paint(line, "dim") for line in style.wrapped(EXPLAINED)]
        room = height - len(head) - len(numbers) - 1
        steps = _timeline(report, figures, min(room - 1, max(3, room * 2 // 3)), style)
        room -= len(steps) + 1
        parts = _parts(figures, room - 1, style)
        room -= len(parts) + 1
        blocks = [head, numbers, steps, parts, _log(frame.log, room - 1, style)]
    lines: list[str] = []
    for block in blocks:
        lines += ["", *block] if lines and block else block
    shown = [line.replace("µs", "us") for line in lines] if ascii else lines
    return shown[:height]


def line_of(step: StepNumbers, *, ascii: bool = False) -> str:
    """Write a step on one line."""
    speed = "" if step.samples_per_second is None else f"   {rate(step.samples_per_second)} samples/s"
    took = f"{time(step.time)}{speed}" if step.whole else f"{time(step.time)} without the pause after it"
    text = f"step {step.step}   {took}"
    if step.bubble is not None and step.bound is not None:
        text += f"   bubble {step.bubble:.1%}, schedule alone {step.bound:.1%}"
    return text.replace("µs", "us") if ascii else text


def _head(frame: Frame, style: Style, *, wrap: bool) -> list[str]:
    """Write the title and the state side by side, or one below the other if the state is long."""
    state = style.cut(frame.state, LONGEST_STATE)
    if len(state) > style.width - 12:
        titles = style.wrapped(frame.title) if wrap else [style.cut(frame.title, style.width)]
        return [
            *(style.paint(line, "bold") for line in titles),
            *(style.paint(line, "dim") for line in style.wrapped(state)),
        ]
    title = style.plain(frame.title)
    if not wrap:
        title = style.cut(title, max(style.width - len(state) - 2, 0))
    elif len(title) + len(state) + 2 > style.width:
        above = [style.paint(line, "bold") for line in style.wrapped(title)]
        return [*above, style.paint(f"{state:>{style.width}}", "dim")]
    space = " " * (style.width - len(title) - len(state))
    return [style.paint(title, "bold") + space + style.paint(state, "dim")]


def _warnings(frame: Frame, style: Style) -> list[str]:
    pace = frame.report.pace if frame.report is not None else None
    slower = [] if pace is None else [style.paint(line, "yellow") for line in style.wrapped(pace.text)]
    found = frame.report.nonfinite if frame.report is not None else None
    if found is None:
        return slower
    counts = [f"{count:,} {what}" for count, what in ((found.nans, "NaN"), (found.infs, "Inf")) if count]
    text = f"First non-finite tensor: {found.tensor} of {found.layer}, in {found.where}"
    text += f" ({', '.join(counts)})" if counts else ""
    return [*(style.paint(line, "red", "bold") for line in style.wrapped(text)), *slower]


def _numbers(figures: LatestStep, style: Style, *, wrap: bool) -> list[str]:
    last, usual = figures.last, figures.usual
    over = f", the median of {figures.steps} steps" if figures.steps > 1 else ""
    rows = [["Step time", time(last.time), f"usually {time(usual.time)}{over}"]]
    if last.samples_per_second is not None and usual.samples_per_second is not None:
        over = f"{rate(usual.samples_per_second)} over all steps including pauses" if figures.steps > 1 else ""
        rows.append(["Throughput", f"{rate(last.samples_per_second)} samples/s", over])
    if last.bubble is not None and usual.bubble is not None and usual.bound is not None:
        bubble = f"usually {usual.bubble:.1%}, schedule alone {usual.bound:.1%}"
        rows.append(["Bubble", f"{last.bubble:.1%}", bubble])
    # A constant width, so that numbers do not jump.
    widths = [12, max(16, *(len(row[1]) for row in rows))]
    lines = []
    for name, value, rest in rows:
        line = style.cut(f"{name:<{widths[0]}}", widths[0]) + style.paint(f"{value:>{widths[1]}}", "bold")
        beside = sum(widths) + 3 + len(rest) <= style.width or not wrap
        lines.append(line + style.paint(style.cut(f"   {rest}", style.width - sum(widths)), "dim") if beside else line)
        if not beside:
            lines += [style.paint(more, "dim") for more in style.wrapped(rest, indent="  ")]
    return lines


def _timeline(report: Report, figures: LatestStep, most: int, style: Style) -> list[str]:
    """Draw the last step, one line per partition, with its bubble."""
    if most < 2:
        return []
    if report.program is not None:
        return step_lines(report.program, figures.last.step, style, most=most)
    glyphs = Glyphs.ascii() if style.ascii else Glyphs()
    step = figures.last.step
    drawn = draw_step(report, step, width=style.width - 22, glyphs=glyphs)
    label, room = max(map(len, drawn.labels)), len(drawn.lines[0])
    title = title_of(report, step, drawn)
    legend = f"{PHASES[0]} F, {PHASES[1]} R, {PHASES[2]} B"
    if figures.left_out is not None:
        legend = f"step {figures.left_out} has no known end"
    beside = len(title) + len(legend) + 3 <= room + label + 5
    head = f"{title}   {legend}" if beside else title
    lines = []
    if len(head) > room + label + 5:  # a long title has lines of its own
        lines, head, title = [style.paint(line, "bold") for line in style.wrapped(title)], "", ""
    space = " " * (room + label + 5 - len(head))
    lines.append(
        style.paint(head[: len(title)], "bold") + style.paint(f"{head[len(title) :]}{space} bubble usually", "dim")
    )
    below = [] if beside else [style.paint(line, "dim") for line in style.wrapped(legend, indent="  ", first="  ")]
    most -= len(below)
    shown = len(drawn.lines) if len(drawn.lines) + len(lines) <= most else most - len(lines) - 1
    left, right = glyphs.edges
    for k in range(max(shown, 1)):
        j, bubble, now, usual = drawn.partitions[k], drawn.bubbles[k], "", ""
        if bubble is not None:
            own = figures.partitions[j] if j < len(figures.partitions) else None
            now, usual = (f"{own.last:.1%}", f"{own.usual:.1%}") if own is not None else (f"{bubble:.1%}", "")
        text = coloured(drawn.lines[k], drawn.phases[k], style)
        lines.append(f"  {drawn.labels[k]:>{label}} {left}{text}{right} {now:>6} {usual:>7}")
    if more := len(drawn.lines) - max(shown, 1):
        lines.append(style.paint(f"  and {count_of(more, 'more partition')}", "dim"))
    return [*lines[:most], *below]


def _parts(figures: LatestStep, most: int, style: Style) -> list[str]:
    """Draw where the time of the last step went as bars: the parts that usually matter, always in the same order."""
    if most < 2:
        return []
    last, usual = figures.last, figures.usual
    total = max(sum(usual.parts), 1e-9)
    taken = max(last.time, 1e-9)
    noticed = [k for k in range(len(figures.names)) if max(usual.parts[k] / total, last.parts[k] / taken) >= NOTICEABLE]
    largest = sorted(noticed, key=lambda k: -usual.parts[k])[: most - 1]
    widest = max(max(last.parts), 1e-9)
    titles = [style.plain(part_title(name) if name not in TITLES else TITLES[name]) for name in figures.names]
    names = 2 + max(map(len, [*TITLES.values(), *(title for title in titles if len(title) <= NAME)]))
    beside = style.width >= names + 2 + 3 * NUMBER  # whether there is room for the medians
    numbers = names + 2 + (3 if beside else 2) * NUMBER
    room = min(style.width - numbers - 2, LONGEST_BAR)
    title = "Where the time goes"
    head = f"{'last':>{numbers - len(title) - NUMBER}}{'usually':>{NUMBER}}" if beside else ""
    lines = [style.paint(title, "bold") + style.paint(head, "dim")]
    for k in sorted(largest):
        title = titles[k]
        if len(title) > NAME:  # a long one has lines of its own
            lines += [f"  {line}" for line in broken(title, style.width - 2)]
            title = ""
        share, before = percent(last.parts[k] / taken), percent(usual.parts[k] / total) if beside else ""
        spent = time(last.parts[k]) if last.parts[k] > 0 else "-"
        text = f"  {title:<{names}}{spent:>{NUMBER}}{share:>{NUMBER}}"
        text += f"{before:>{NUMBER}}" if beside else ""
        if room >= 4:
            name = figures.names[k]
            colour = "green" if name in COMPUTED else "yellow" if name in LOSSES else "magenta"
            text += "  " + style.paint(bar(last.parts[k] / widest, room, ascii=style.ascii), colour)
        lines.append(text)
    return lines[:most]


def _log(log: Sequence[LogLine], most: int, style: Style) -> list[str]:
    """Write the last log lines of the program from INFO on, and warnings of others, as many as there is room for.

    Engines log every task, or how they are set up, many times as often as a program logs anything.
    """
    shown = [line for line in log if _is_wanted(line)][-(most - 1) :] if most >= 2 else []
    if not shown:
        return []
    digits = max((len(str(line.step)) for line in shown if line.step is not None), default=0)
    lines: list[str] = []
    for line in reversed(shown):
        message = line.message.strip().split("\n", 1)[0]
        text = f"{line.level:<8}{message}" if line.level else message
        place = f"step {line.step:>{digits}}  " if line.step is not None else " " * (digits + 7) if digits else ""
        whole = style.plain(f"  {place}{text}")
        drawn = [whole] if len(whole) <= style.width else _broken(whole, style.width)
        if len(lines) + len(drawn) > most - 1:
            drawn = [style.cut(whole, style.width)]
        lines[:0] = [style.paint(part, _LEVELS.get(line.level, "dim")) for part in drawn]
        if len(lines) >= most - 1:
            break
    return [style.paint("Log", "bold"), *lines]


def _broken(line: str, width: int) -> list[str]:
    """Break a log line that is too long."""
    return broken(line.strip(), width, indent="      ", first="  ")


def _is_wanted(line: LogLine) -> bool:
    is_the_programs = not line.logger.startswith(("pipesight.", "torch."))
    return line.level in _LEVELS or (is_the_programs and line.level not in _QUIET)
