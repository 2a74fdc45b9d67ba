"""The text of a training log: how long its iterations take, and its timers."""

from __future__ import annotations

from pipesight._formatting import percent, rate, time
from pipesight.analysis.logged_steps import LoggedSteps
from pipesight.view.text_layout import NAMED, Style, columns, spark

__all__ = ["log_blocks"]


def log_blocks(logged: LoggedSteps, style: Style) -> list[list[str]]:
    """Draw the iterations of a log, and list its timers."""
    dash = "-" if style.ascii else "\N{EN DASH}"
    spread = f", p10{dash}p90 {time(logged.time.low)}{dash}{time(logged.time.high)}" if logged.counted > 1 else ""
    speed = [["Iteration", f"{time(logged.time.median)}{spread}"]]
    if logged.samples_per_second is not None:
        speed.append(["Throughput", f"{rate(logged.samples_per_second)} samples/s"])
    top = max(logged.times)
    drawn = spark(logged.times, max(8, style.width - 28), top=top, ascii=style.ascii)
    speed.append(["Each line", f"{drawn}  to {time(top)}"])
    blocks = [columns(speed, align="ll")]
    if logged.timers:
        blocks.append(_timers(logged, style))
    return blocks


def _timers(logged: LoggedSteps, style: Style) -> list[str]:
    table = [[style.paint(cell, "dim") for cell in ("timer", "fastest rank", "slowest", "share", "lines")]]
    for timer in logged.timers:
        least = "-" if timer.least is None else time(timer.least)
        share = "outside" if timer.share is None else percent(timer.share)
        table.append([style.plain(timer.name), least, time(timer.most), share, f"{timer.count:,}"])
    title = "Timers of an iteration (some are inside others)"
    laid = columns(table, align="lrrrr", names=NAMED, width=style.width - 2)
    return [style.paint(title, "bold"), *(f"  {line}" for line in laid)]
