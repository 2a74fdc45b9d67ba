"""Draw the diagrams of the documents as SVG, with the schedules and the simulator that the planner uses.

    python docs/pictures/draw.py     writes docs/pictures/*.svg

A test compares the files with what this draws, so they cannot get out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from pipesight.plan import (
    Schedule,
    Simulation,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    recomputed,
    simulate,
    v_half,
    v_min,
    zbv,
    zero_bubble,
)

HERE = Path(__file__).resolve().parent
INK, GREY, PALE, RED, WHITE = "#1c2733", "#66727f", "#e6eaee", "#c23b22", "#ffffff"
FILLS = {"F": "#a9c8ea", "R": "#e3d9b0", "B": "#2f6690", "W": "#6aa58c"}
LETTERS = {"F": INK, "R": INK, "B": WHITE, "W": WHITE}
KINDS = "FRBW"
WIDEST = 33
"""Units of time that are drawn of schedules that are compared."""


class Picture:
    """An SVG under construction: shapes are added in the order in which they are painted."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = WHITE, **style: object) -> None:
        """Draw a rectangle."""
        self._add("rect", x=x, y=y, width=width, height=height, fill=fill, **style)

    def line(self, *points: tuple[float, float], arrow: bool = False, **style: object) -> None:
        """Draw a line through points."""
        way = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        head = {"marker-end": "url(#arrow)"} if arrow else {}
        self._add("polyline", points=way, **{"fill": "none", "stroke": INK, "stroke-width": 1.2, **head, **style})

    def text(self, x: float, y: float, words: str, size: float = 13, anchor: str = "start", **style: object) -> None:
        """Write a line of text."""
        attributes = _attributes({"x": x, "y": y, "font-size": size, "text-anchor": anchor, "fill": INK, **style})
        self.parts.append(f"<text{attributes}>{escape(words)}</text>")

    def brace(self, x: float, end: float, y: float, words: str, colour: str = INK) -> None:
        """Mark a span of time below a drawing, and name it."""
        self.line((x, y - 4), (x, y), (end, y), (end, y - 4), stroke=colour)
        self.text((x + end) / 2, y + 15, words, anchor="middle", fill=colour)

    def svg(self) -> str:
        """Return the file."""
        width, height = self.size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(width)} {_number(height)}" '
                f'width="{_number(width)}" font-family="system-ui, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
                f'<path d="M0,0.5 L8,4 L0,7.5 z" fill="{INK}"/></marker></defs>',
                f'<rect width="100%" height="100%" fill="{WHITE}"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )

    def _add(self, name: str, **attributes: object) -> None:
        self.parts.append(f"<{name}{_attributes(attributes)}/>")


def _attributes(values: dict[str, object]) -> str:
    named = {
        name.replace("_", "-"): _number(value) if isinstance(value, float) else value for name, value in values.items()
    }
    return "".join(f' {name}="{value}"' for name, value in named.items())


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def run(schedule: Schedule, forward: float = 1, backward: float = 2, recompute: float = 1) -> Simulation:
    """Simulate a schedule; where it splits the backward, each half takes half of it."""
    split, times = schedule.split, np.empty((4, schedule.stages, schedule.chunks))
    times[0], times[1], times[3] = forward, recompute, backward / 2
    times[2] = np.where(split, backward / 2, backward)
    return simulate(schedule, times)


def timeline(
    picture: Picture, x: float, y: float, found: Simulation, scale: float, *, lane: float = 26, names: str = "partition"
) -> None:
    """Draw when each device runs which task: a lane for each, with the idle time of the window in grey."""
    schedule = found.schedule
    width = float(found.makespan) * scale
    for device in range(schedule.devices):
        top = y + device * (lane + 5)
        picture.box(x, top, width, lane, PALE)
        if names:
            picture.text(x - 8, top + lane * 0.68, f"{names} {device}", anchor="end")
        for kind, stage, i in schedule.order[device]:
            if kind < 0:
                continue
            begin, end = (float(times[kind, stage, i]) for times in (found.begin, found.end))
            letter = KINDS[kind]
            second = schedule.stages > schedule.devices and stage >= schedule.devices
            picture.box(x + begin * scale, top, (end - begin) * scale, lane, FILLS[letter], stroke=WHITE)
            if second:  # the second stage of a device
                picture.box(x + begin * scale + 1, top + lane - 4, (end - begin) * scale - 2, 3, RED)
            label = f"{letter}{i}" if (end - begin) * scale >= 20 else f"{i}"
            picture.text(x + (begin + end) / 2 * scale, top + lane * 0.68, label, 12, "middle", fill=LETTERS[letter])


def legend(picture: Picture, x: float, y: float, kinds: str) -> None:
    """Say what the colours mean."""
    words = {"F": "forward", "R": "recompute", "B": "backward", "W": "weight gradient"}
    for kind in kinds:
        picture.box(x, y - 11, 14, 14, FILLS[kind])
        picture.text(x + 20, y, words[kind], fill=GREY)
        x += 40 + 7.2 * len(words[kind])
    picture.box(x, y - 11, 14, 14, PALE)
    picture.text(x + 20, y, "idle: the bubble", fill=GREY)


def partitions() -> Picture:
    """A model that is cut into partitions."""
    picture = Picture(760, 190, "A model of seven layers, cut into two partitions on two devices")
    names = ["Linear", "ReLU", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    for begin, end, j in ((0, 4, 0), (4, 7, 1)):
        left, width = 20 + begin * 102 + j * 16, (end - begin) * 102 - 12
        picture.box(left - 6, 52, width + 12, 76, PALE, rx=8)
        picture.text(left + width / 2, 42, f"partition {j}", 14, "middle", font_weight="bold")
        picture.text(left + width / 2, 148, f"devices[{j}]", 13, "middle", fill=GREY)
    for k, name in enumerate(names):
        left = 20 + k * 102 + (16 if k >= 4 else 0)
        picture.box(left, 66, 90, 48, FILLS["F"], rx=5)
        picture.text(left + 45, 87, name, 13, "middle")
        picture.text(left + 45, 104, f"layer {k}", 11, "middle", fill=GREY)
        if k:
            picture.line((left - (28 if k == 4 else 12), 90), (left - 1, 90), arrow=True)
    picture.text(380, 178, "balance=[4, 3]", 14, "middle", font_family="monospace")
    return picture


def pipelining() -> Picture:
    """One mini-batch, with and without micro-batches."""
    picture = Picture(860, 270, "The same mini-batch on two devices, whole and in four micro-batches")
    for y, chunks, words in ((40, 1, "chunks=1: the devices take turns"), (160, 4, "chunks=4: they overlap")):
        found = run(gpipe(2, chunks), 4 / chunks, 8 / chunks)
        picture.text(110, y - 12, words, 14, font_weight="bold")
        timeline(picture, 110, y, found, 30)
        end = 110 + float(found.makespan) * 30
        picture.text(end, y + 74, f"bubble {float(found.bubble):.0%}", 13, "end", fill=GREY)
    legend(picture, 110, 262, "FB")
    return picture


def annotated() -> Picture:
    """A window with everything that has a name."""
    chunks = 4
    schedule = gpipe(3, chunks, recompute=recomputed("except_last", chunks), joined=True)
    found = run(schedule)
    scale = 30.0
    end = float(found.makespan)
    picture = Picture(150 + end * scale, 250, "The window of a mini-batch: three partitions, four micro-batches")
    x, y = 110.0, 62.0
    picture.text(x, 22, 'checkpoint="except_last": micro-batches 0 to 2 are recomputed', 14, font_weight="bold")
    timeline(picture, x, y, found, scale)
    fill = float(found.begin[0, 2, 0])
    picture.brace(x, x + fill * scale, y + 106, "fill", RED)
    drained = float(found.end[2, 2, 0])
    picture.brace(x + drained * scale, x + end * scale, y + 106, "drain", RED)
    last, first = float(found.end[0, 0, chunks - 1]), float(found.begin[2, 0, chunks - 1])
    picture.text(x + (last * 0.35 + first * 0.65) * scale, y + 18, "waits for its gradient", 12, "middle", fill=GREY)
    picture.line((x, y - 14), (x + end * scale, y - 14), arrow=True)
    picture.text(x + end * scale / 2, y - 20, "window: first forward to last backward", 12, "middle")
    loss = float(found.end[0, 2, chunks - 1])
    picture.line((x + loss * scale, y - 6), (x + loss * scale, y + 98), stroke=RED, stroke_dasharray="4 3")
    picture.text(x + loss * scale, y + 122, "loss", 13, "middle", fill=RED)
    legend(picture, x, 240, "FRB")
    return picture


def one_stage() -> Picture:
    """Schedules with one stage per device."""
    return compared(
        [
            (gpipe(4, 8), "GPipe"),
            (one_f_one_b(4, 8), "1F1B"),
            (zero_bubble(4, 8), "zero bubble (ZB-H1)"),
        ],
        "Schedules with one stage per device, with their activation memory",
    )


def in_loops() -> Picture:
    """Schedules whose stages go round the devices."""
    return compared(
        [
            (looped_bfs(8, 8, devices=4), "looped BFS"),
            (interleaved(8, 8, devices=4), "interleaved 1F1B"),
            (zero_bubble(8, 8, devices=4), "interleaved zero bubble"),
        ],
        "Schedules with two stages per device in a loop, with their activation memory",
    )


def in_vs() -> Picture:
    """Schedules whose stages lie in a V."""
    return compared(
        [
            (zbv(8, 8), "ZBV"),
            (dualpipev(8, 8), "DualPipeV"),
            (v_half(8, 8), "V-Half"),
            (v_min(8, 8), "V-Min"),
        ],
        "Schedules with two stages per device in a V, with their activation memory",
    )


def compared(made: Sequence[tuple[Schedule, str]], title: str) -> Picture:
    """Draw schedules below each other, in one scale, with what they hold."""
    scale, x, tall = 21.0, 90.0, 228.0
    picture = Picture(x + WIDEST * scale + 30, 40 + tall * len(made) + 20, title)
    several = made[0][0].stages > made[0][0].devices
    for k, (schedule, name) in enumerate(made):
        share = schedule.devices / schedule.stages
        found = run(schedule, share, 2 * share)
        y = 44 + k * tall
        picture.text(x, y - 10, name + (": red is the second stage" if several else ""), 14, font_weight="bold")
        words = f"window {float(found.makespan):g}, bubble {float(found.bubble):.0%}"
        picture.text(x + WIDEST * scale, y - 10, words, 13, "end", fill=GREY)
        timeline(picture, x, y, found, scale, lane=22, names="device")
        memory(picture, x, y + 116, found, scale, share)
    legend(picture, x, 40 + tall * len(made) + 8, "FBW" if any(one.split.any() for one, _ in made) else "FB")
    return picture


def memory(picture: Picture, x: float, y: float, found: Simulation, scale: float, share: float) -> None:
    """Draw how many micro-batches' activations device 0 and the last device hold over time."""
    schedule = found.schedule
    height, most = 56.0, 8.0
    picture.line((x, y), (x, y + height), (x + WIDEST * scale, y + height), stroke=GREY)
    picture.text(x - 8, y + 10, "8", 11, "end", fill=GREY)
    picture.text(x - 8, y + height, "0", 11, "end", fill=GREY)
    picture.text(x - 22, y + 34, "held", 11, "end", fill=GREY)
    for device, style in ((0, {"stroke": RED}), (schedule.devices - 1, {"stroke": INK, "stroke-dasharray": "4 3"})):
        changes: dict[float, float] = {}
        for stage in (s for s, home in enumerate(schedule.device_of_stage) if home == device):
            for i in range(schedule.chunks):
                last_kind = 3 if schedule.split[stage, i] else 2
                for when, change in ((found.begin[0, stage, i], share), (found.end[last_kind, stage, i], -share)):
                    changes[float(when)] = changes.get(float(when), 0.0) + change
        held, points = 0.0, [(x, y + height)]
        for when, change in sorted(changes.items()):
            at = x + when * scale
            points.append((at, y + height - held / most * height))
            held += change
            points.append((at, y + height - held / most * height))
        picture.line(*points, **style)
        peak = max(height - (py - y) for _, py in points) / height * most
        words = f"device {device}: at most {peak:g}"
        picture.text(x + WIDEST * scale, y + (10 if device == 0 else 26), words, 12, "end", fill=style["stroke"])


def step() -> Picture:
    """What a step is made of."""
    found = run(gpipe(2, 3))
    scale, x, y = 30.0, 110.0, 60.0
    picture = Picture(860, 210, "The anatomy of a step: data loading, the window, the optimizer, the rest")
    start = x + 60
    picture.box(x, y, 60, 57, "#f0d9c8")
    picture.text(x + 30, y + 25, "data", 12, "middle")
    picture.text(x + 30, y + 41, "loading", 12, "middle")
    for device in range(2):
        picture.text(x - 8, y + 18 + device * 31, f"partition {device}", anchor="end")
    timeline(picture, start, y, found, scale, names="")
    end = start + float(found.makespan) * scale
    for left, width, fill, words in ((end, 84, "#d5c5e0", "optimizer"), (end + 84, 66, "#e8e2d0", "the rest")):
        picture.box(left, y, width, 57, fill)
        picture.text(left + width / 2, y + 33, words, 12, "middle")
    picture.brace(start, end, y + 72, "window: computing, and the losses inside the pipeline")
    picture.brace(end, end + 150, y + 72, "outside the window")
    picture.line((x, y - 14), (end + 150, y - 14), arrow=True)
    picture.text((x + end + 150) / 2, y - 22, "step", 14, "middle", font_weight="bold")
    legend(picture, x, 192, "FB")
    return picture


def mesh() -> Picture:
    """Ranks of two replicas."""
    picture = Picture(760, 270, "A mesh of six ranks: three partitions by two replicas")
    for column in range(3):
        picture.text(230 + column * 190, 30, f"partition {column}", 14, "middle", font_weight="bold")
    for row in range(2):
        y = 50 + row * 110
        picture.box(130, y - 6, 590, 76, PALE, rx=8)
        picture.text(118, y + 30, f"replica {row}", 14, "end", font_weight="bold")
        picture.text(118, y + 48, "its own samples", 11, "end", fill=GREY)
        for column in range(3):
            x = 165 + column * 190
            picture.box(x, y + 6, 130, 52, FILLS["F"], rx=5)
            picture.text(x + 65, y + 37, f"rank {column * 2 + row}", 14, "middle")
            if column:
                picture.line((x - 60, y + 24), (x - 2, y + 24), arrow=True)
                picture.line((x, y + 42), (x - 58, y + 42), arrow=True)
            if row == 0:
                picture.line((x + 65, y + 58), (x + 65, y + 114), stroke=RED, stroke_width=2)
    picture.text(440, 252, "across: activations and gradients of micro-batches", 12, "middle", fill=GREY)
    picture.text(440, 266, "down (red): gradients of the same parameters, averaged once a step", 12, "middle", fill=RED)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "partitions": partitions,
    "pipelining": pipelining,
    "window": annotated,
    "schedules-one-stage": one_stage,
    "schedules-in-loops": in_loops,
    "schedules-in-vs": in_vs,
    "step": step,
    "mesh": mesh,
}


def main() -> int:
    """Write all of them."""
    for name, drawn in PICTURES.items():
        (HERE / f"{name}.svg").write_text(drawn().svg(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
