"""Show a training in the terminal as it runs: how far it is, and what each partition is doing.

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

from pipesight import context
from pipesight.demo.progress import Progress
from pipesight.demo.watch import Activity, Watch
from pipesight.pipeline.gpipe import GPipe

__all__ = ["LiveDisplay"]

WIDTH = 100
"""Columns it takes at most; lines longer than that are hard to follow."""

LONGEST_LANE = 16
"""Micro-batches that are drawn one by one; more are only counted."""

STYLES = {"forward": "green", "recompute": "yellow", "backward": "cyan"}


class LiveDisplay:
    """Redraws itself ten times a second between ``with`` and its end, and then vanishes.

    Example::

        with LiveDisplay(pipe, Console()) as display:
            while not meter.done:
                display.show(meter.record(training.step()))
    """

    def __init__(self, pipe: GPipe, console: Console) -> None:
        self._devices = [str(device) for device in pipe.devices]
        self._classes = {
            name: type(layer).__name__ for partition in pipe.partitions for name, layer in partition.named_children()
        }
        self._chunks = pipe.chunks
        self._ascii = console.options.ascii_only
        self._watch = Watch(len(pipe.partitions))
        self._progress: Progress | None = None
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=10, transient=True)

    def __enter__(self) -> Self:
        context.attach(self._watch)
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        context.detach(self._watch)
        self._live.stop()

    def show(self, progress: Progress) -> None:
        """Take note of where the training stands, for the next redraw."""
        self._progress = progress

    def _draw(self) -> RenderableType:
        progress = self._progress
        lines = [Text("starting"), Text()] if progress is None else [_bar(progress), _numbers(progress)]
        return Constrain(Group(*lines, "", self._partitions()), WIDTH)

    def _partitions(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title, width in (
            ("partition", 0),
            ("device", max(map(len, self._devices))),
            ("layer", max(map(len, self._classes))),
            ("class", max(map(len, self._classes.values()))),
            ("phase", len("recompute")),
            ("micro-batch", 0),
        ):
            table.add_column(title, min_width=max(width, len(title)), no_wrap=True)
        for j, (device, activity) in enumerate(zip(self._devices, self._watch.rows, strict=True)):
            if activity is None:
                table.add_row(str(j), device, "", "", "idle", self._lane(None), style="dim")
            else:
                layer, style = activity.layer or "", STYLES[activity.phase]
                phase = Text(activity.phase, style)
                table.add_row(str(j), device, layer, self._classes.get(layer, ""), phase, self._lane(activity))
        return table

    def _lane(self, activity: Activity | None) -> Text:
        """Draw all micro-batches of a batch, and mark the one at hand."""
        digits = len(str(self._chunks - 1))
        number = Text(f"{'' if activity is None else activity.microbatch:>{digits}} ")
        if self._chunks > LONGEST_LANE:
            return number if activity is None else number.append(f"of {self._chunks}", "dim")
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
    line.add_row(ProgressBar(total=1, completed=progress.share), _times(progress))
    return line


def _times(progress: Progress) -> str:
    if progress.steps is None:
        step = f"step {progress.step:4}"
    else:
        step = f"step {progress.step:{len(str(progress.steps))}}/{progress.steps}"
    return f"{step}  {_clock(progress.elapsed)} elapsed  {_clock(math.ceil(progress.left))} left"


def _numbers(progress: Progress) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"loss {progress.loss:.3f}", "bold")
    line.append(f"   smoothed {progress.smoothed_loss:.3f}   first {progress.first_loss:.3f}")
    return line.append(f"   {progress.samples_per_second:6.0f} samples/s", "bold")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"
