"""Show a training in the terminal while it runs: its progress, and what each partition is doing.

::

    ━━━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━  step  130  0:12 elapsed  0:08 left
    loss 2.234   smoothed 2.241   first 4.159      330 samples/s

    partition  device  layer   class             phase      micro-batch
    0          cpu     block0  TransformerBlock  forward    3 ···▮
    1          cpu     block1  TransformerBlock  forward    2 ··▮·
    2          cpu                               idle         ····
    3          cpu     head    CharHead          forward    0 ▮···
"""

from __future__ import annotations

import math
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipesight.demo.partition_activity import Activity, ActivityMonitor
from pipesight.demo.progress import Progress
from pipesight.pipeline.gpipe import GPipe

__all__ = ["LiveDisplay"]

WIDTH = 100
"""The most columns it takes; longer lines are hard to read."""

GAP = 2
"""Columns between the columns of the table."""

LONGEST_LANE = 16
"""The most micro-batches that are drawn one by one; more are only counted."""

STYLES = {"forward": "green", "recompute": "yellow", "backward": "cyan"}


class LiveDisplay:
    """Redraws itself ten times a second inside its ``with`` block, then disappears.

    Example::

        with ActivityMonitor(partitions=4) as watch, LiveDisplay(pipe, watch, Console()) as display:
            while not meter.done:
                display.show(meter.record(training.step()))
    """

    def __init__(self, pipe: GPipe, watch: ActivityMonitor, console: Console) -> None:
        self._devices = [str(device) for device in pipe.devices]
        self._classes = {
            name: type(layer).__name__ for partition in pipe.partitions for name, layer in partition.named_children()
        }
        self._chunks = pipe.chunks
        self._console = console
        self._ascii = console.options.ascii_only
        self._watch = watch
        self._progress: Progress | None = None
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=10, transient=True)

    @property
    def fits(self) -> bool:
        """Whether the terminal is wide and high enough."""
        widths = self._widths().values()
        height = len(self._watch.rows) + 4  # two lines of numbers, an empty one, and the titles
        return self._console.width >= sum(widths) + GAP * (len(widths) - 1) and self._console.height >= height

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, progress: Progress) -> None:
        """Set the progress for the next redraw."""
        self._progress = progress

    def _draw(self) -> RenderableType:
        progress, width = self._progress, min(self._console.width, WIDTH)
        lines = [Text("starting"), Text()] if progress is None else [_bar(progress), _numbers(progress)]
        return Constrain(Group(*lines, "", self._partitions()), width)

    def _partitions(self) -> Table:
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
        for title, least in self._widths().items():
            table.add_column(title, min_width=least, no_wrap=True)
        for j, activity in enumerate(self._watch.rows):
            table.add_row(*self._row(j, activity), style="dim" if activity is None else "")
        return table

    def _widths(self) -> dict[str, int]:
        """Return the width of each column, which does not depend on what partitions do."""
        widths = {
            "partition": 0,
            "device": max(map(len, self._devices)),
            "layer": max(map(len, self._classes)),
            "class": max(map(len, self._classes.values())),
            "phase": len("recompute"),
            "micro-batch": len(self._lane(Activity("forward", self._chunks - 1, None))),
        }
        return {title: max(width, len(title)) for title, width in widths.items()}

    def _row(self, j: int, activity: Activity | None) -> tuple[RenderableType, ...]:
        layer = "" if activity is None else activity.layer or ""
        phase = "idle" if activity is None else Text(activity.phase, STYLES[activity.phase])
        return str(j), self._devices[j], layer, self._classes.get(layer, ""), phase, self._lane(activity)

    def _lane(self, activity: Activity | None) -> Text:
        """Draw all micro-batches of a batch, and mark the current one."""
        digits = len(str(self._chunks - 1))
        number = Text(f"{'' if activity is None else activity.microbatch:>{digits}} ")
        if self._chunks > LONGEST_LANE:
            return number if activity is None else number.append(f"of 0..{self._chunks - 1}", "dim")
        idle, busy = (".", "#") if self._ascii else ("·", "▮")
        for i in range(self._chunks):
            if activity is not None and i == activity.microbatch:
                number.append(busy, STYLES[activity.phase])
            else:
                number.append(idle, "dim")
        return number


def _bar(progress: Progress) -> Table:
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    times = f"{progress.count}  {_clock(progress.elapsed)} elapsed  {_clock(math.ceil(progress.left))} left"
    line.add_row(ProgressBar(total=1, completed=progress.share), times)
    return line


def _numbers(progress: Progress) -> Text:
    losses = f"   smoothed {progress.smoothed_loss:.3f}   first {progress.first_loss:.3f}"
    line = Text(f"loss {progress.loss:.3f}", "bold", no_wrap=True, overflow="ellipsis")
    return line.append(losses, "not bold").append(f"   {progress.samples_per_second:6.0f} samples/s")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"
