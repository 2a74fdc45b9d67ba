"""`pipesight watch`: a running training in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipesight._os_facts import processors
from pipesight.cli._colour import in_colour
from pipesight.cli._failures import failing_in_one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from pipesight.analysis.report import Report
    from pipesight.runs.following.follower import Follower
    from pipesight.view.live.watch_screen import Frame

__all__ = ["add_to", "run"]

INTERVAL = 1.0  # seconds from one look to the next, at least
COST = 0.01
"""The share of the machine's processors that looks may take."""
LONGEST = 5.0
"""Seconds between looks, at most."""
AGAIN = 20
"""Steps from which a change of pace is a new one, though the same is named; when it began is known to a few steps."""
LEAST = (40, 8)
"""Columns and lines of the smallest terminal that is drawn in; below, one line per step is printed."""


def add_to(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its options."""
    parser = subcommands.add_parser(
        "watch",
        help="show a run in the terminal while it is running",
        description="Show the last step of a run while it is running: how long it took, the bubble of each partition, "
        "where the time goes, and the last log lines. If the run does not exist yet, wait for it. Stops when the run "
        "ends, or on Ctrl-C. If the output is not a terminal, print one line per step.",
    )
    add = parser.add_argument
    add("run_path", type=Path, metavar="RUN", help="a run directory, a folder of traces, or one trace")
    add("--plain", action="store_true", help="print one line per step, even in a terminal")
    parser.set_defaults(run=run)


@failing_in_one_line("watch")
def run(options: argparse.Namespace) -> int:
    """Watch until the run ends, and return the exit code."""
    from rich.console import Console

    import pipesight.analysis.analyse  # noqa: F401  # now, so that the first look does not take longer
    from pipesight.runs.following.follower import Follower, check_place

    check_place(options.run_path)
    console = Console(markup=False, highlight=False, emoji=False)
    # Where FORCE_COLOR is set, everything is a terminal to rich.
    live = sys.stdout.isatty() and not options.plain and not console.is_dumb_terminal
    follower = Follower(options.run_path)
    try:
        if live and console.width >= LEAST[0] and console.height >= LEAST[1]:
            _watch(follower, console)
        else:
            _print(follower, ascii=console.options.ascii_only)
    except KeyboardInterrupt:
        pass
    finally:
        follower.close()
    return 0


# One line per step.


def _print(follower: Follower, *, ascii: bool) -> None:
    from pipesight.analysis.latest_step import steps_of
    from pipesight.runs.format import RUN_FILE
    from pipesight.view.live.watch_screen import line_of

    shown, attempt = -1, 0
    said: set[str] = set()
    slower: dict[str, int] = {}  # since when, by what was named

    def say(words: str) -> None:
        if words not in said:
            said.add(words)
            print(words, flush=True)

    while True:
        begin = time.process_time()
        changed = follower.look()
        for note in follower.run.notes:
            if note.text.startswith("refused") or note.path.name == RUN_FILE:
                say(str(note))
        if follower.state.phase == "waiting":
            say(f"{follower.path}: {_state(follower)}")
        if follower.run.attempt.number != attempt:
            shown, attempt = -1, follower.run.attempt.number
            say(f"{follower.path}: restarted; this is attempt {attempt}")
        if changed and (report := _report(follower)) is not None:
            if report.nonfinite is not None:
                found = report.nonfinite
                say(f"not finite: {found.tensor} of {found.layer}, first in {found.where}")
            for step in steps_of(report, ended=follower.state.phase == "ended"):
                if step.step > shown:
                    print(line_of(step, ascii=ascii), flush=True)
                    shown = step.step
            if (pace := report.pace) is not None:
                what = [(cause.kind, cause.ranks) for cause in pace.causes[:1]]
                if str(what) not in slower or pace.since > slower[str(what)] + AGAIN:
                    print(pace.text.replace("µs", "us") if ascii else pace.text, flush=True)
                slower[str(what)] = pace.since
        if follower.state.phase == "ended":
            say(f"{follower.path}: {_state(follower)}")
            return
        time.sleep(pause_after(time.process_time() - begin))


def pause_after(spent: float) -> float:
    """Return the seconds to the next look, given the processor time of the last: the training has the machine."""
    return min(max(INTERVAL, spent / (COST * processors())), LONGEST)


# A screen that is redrawn.


def _watch(follower: Follower, console: Console) -> None:
    from rich.live import Live

    frames = _frames(follower)
    frame = next(frames)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_drawn(frame, console), console=console, auto_refresh=False, screen=True) as live,
    ):
        for frame in frames:
            live.update(_drawn(frame, console), refresh=True)
    console.print(_drawn(frame, console, spare=1))  # the last screen stays


def _frames(follower: Follower) -> Iterator[Frame]:
    """Yield frames until the run has ended."""
    report: Report | None = None
    yield _frame(follower, report)
    while True:
        begin = time.process_time()
        if follower.look():
            report = _report(follower)
        yield _frame(follower, report)
        if follower.state.phase == "ended":
            return
        time.sleep(pause_after(time.process_time() - begin))


def _drawn(frame: Frame, console: Console, *, spare: int = 0) -> Text:
    from rich.text import Text

    from pipesight.view.live.watch_screen import draw_frame

    lines = draw_frame(
        frame,
        width=console.width,
        height=console.height - spare,
        colour=in_colour(),
        ascii=console.options.ascii_only,
    )
    return Text.from_ansi("\n".join(lines), no_wrap=True, end="")


def _frame(follower: Follower, report: Report | None) -> Frame:
    from pipesight.analysis.latest_step import latest_step
    from pipesight.view.live.watch_screen import Frame

    ended = follower.state.phase == "ended"
    figures = latest_step(report, ended=ended) if report is not None else None
    return Frame(str(follower.path), _state(follower), report, figures, list(follower.run.log_lines()))


def _report(follower: Follower) -> Report | None:
    from pipesight.analysis.analyse import analyse

    return analyse(follower.run, advice=False) if follower.run.steps() else None


def _state(follower: Follower) -> str:
    """Return the state of the run in words."""
    state = follower.state
    if state.phase == "waiting":
        return "waiting for a recording"
    if state.phase == "ended":
        return f"ended: {state.outcome}"
    attempt = follower.run.attempt.number
    again = f", attempt {attempt}" if attempt else ""
    yet = "" if follower.run.steps() else ", no complete step yet"
    return f"running{_since(follower.run.description.get('started'))}{again}{yet}"


def _since(started: object) -> str:
    try:
        begin = datetime.fromisoformat(str(started))
    except ValueError:
        return ""
    seconds = int((datetime.now(UTC) - begin.astimezone(UTC)).total_seconds())
    minutes, seconds = divmod(max(seconds, 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f" for {hours}:{minutes:02}:{seconds:02}" if hours else f" for {minutes}:{seconds:02}"
