"""What a training log of Megatron-LM says of its iterations: their times, timers over ranks, and curves.

A line has the mean of the iterations since the line before. The first line is often about one iteration, the slowest,
so it counts only if there is no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from pipesight._formatting import percent, time
from pipesight._plurals import count_of
from pipesight.analysis.curves import Curve
from pipesight.analysis.run_remarks import Remark
from pipesight.analysis.step_times import Summary, summary
from pipesight.analysis.verdict import Verdict
from pipesight.runs.reading.megatron_log import ELAPSED, LoggedIteration, TrainingLog

__all__ = ["LoggedSteps", "LoggedTimer", "logged_curves", "logged_steps", "remarks_on_log", "verdict_on_log"]

_BATCH = "global batch size"
_SKIPPED, _NAN = "number of skipped iterations", "number of nan iterations"
_NO_CURVE = (ELAPSED, "consumed samples", "skipped samples")
_LOSS = {"lm loss": "loss"}  # as our own runs call it, so that they can be compared
_OUTER = ("forward-backward", "optimizer")
"""Timers that are not inside others."""
_MOST = 1e15  # samples, or iterations
_NOTED = 0.01
"""The share of the time from which what is outside iterations is worth a remark."""


@dataclass(frozen=True, slots=True)
class LoggedTimer:
    """A timer, in microseconds."""

    name: str
    """As it was logged."""
    count: int
    """How many times it was logged."""
    least: float | None
    """Median over lines of the rank that took least, of those that ran it; ``None`` if only the most was logged."""
    most: float
    """Likewise of the rank that took most."""
    share: float | None
    """Of ``most`` in an iteration; ``None`` for what runs outside iterations."""


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """The iterations of a log, in microseconds."""

    steps: tuple[int, ...]
    """The last iteration that each line is about."""
    times: tuple[float, ...]
    """The time of an iteration: for each line, the mean of those since the line before."""
    time: Summary
    """Of an iteration, over the lines that count."""
    samples_per_second: float | None
    """The median over them."""
    outside: float | None
    """Time between the first and the last of them that no iteration takes; ``None`` if it is not known."""
    elapsed: float | None
    """All time between these lines."""
    counted: int
    """How many lines count: all but the first since the program started, unless it is the only one."""
    skipped: int
    """Iterations that were skipped."""
    nan: int
    """Iterations in which a loss was not finite."""
    timers: tuple[LoggedTimer, ...]
    """In the order of the log."""


def logged_steps(log: TrainingLog) -> LoggedSteps:
    """Return what a log with at least one iteration says."""
    lines = log.iterations
    counted = [line for line in lines if not line.is_first] or lines
    times = summary(np.array([_microseconds(line.values[ELAPSED]) for line in counted]))
    speeds = [_count(line, _BATCH) / line.values[ELAPSED] * 1e3 for line in counted if _count(line, _BATCH)]
    # A first line of one iteration has timers that were divided by more.
    timed = [line for line in lines if not line.is_first]
    names = dict.fromkeys(name for line in timed for name in line.timers)
    timers = [_timer(name, [line.timers[name] for line in timed if name in line.timers], times) for name in names]
    apart = [one for line in lines for one in line.apart]
    timers += [_timer(name, [spread for other, spread in apart if other == name], None) for name in dict(apart)]
    elapsed = _between(counted)
    inside = sum((b.number - a.number) * _microseconds(b.values[ELAPSED]) for a, b in pairwise(counted))
    return LoggedSteps(
        steps=tuple(line.number for line in lines),
        times=tuple(_microseconds(line.values[ELAPSED]) for line in lines),
        time=times,
        samples_per_second=median(speeds) if speeds else None,
        outside=None if elapsed is None else max(0.0, elapsed - inside),
        elapsed=elapsed,
        counted=len(counted),
        skipped=sum(_count(line, _SKIPPED) for line in lines),
        nan=sum(_count(line, _NAN) for line in lines),
        timers=tuple(timers),
    )


def logged_curves(log: TrainingLog) -> tuple[Curve, ...]:
    """Return what lines say over iterations, the loss and the learning rate first; not what never changes."""
    lines = log.iterations
    names = dict.fromkeys(name for line in lines for name in line.values if name not in _NO_CURVE)
    found = []
    for name in names:
        known = [(line.number, line.values[name]) for line in lines if name in line.values]
        if name in (_BATCH, _SKIPPED, _NAN) and len({value for _, value in known}) == 1:
            continue
        steps, values = zip(*known, strict=True)
        found.append(Curve(_LOSS.get(name, name), steps, values))
    first = {"loss": 0, "learning rate": 1, "grad norm": 2}
    return tuple(sorted(found, key=lambda curve: first.get(curve.name, 3)))


def verdict_on_log(logged: LoggedSteps) -> Verdict:
    """Say how long an iteration takes, and what most of it is."""
    text = f"An iteration takes {time(logged.time.median)}, the median of {count_of(logged.counted, 'logged line')}."
    large = [timer for timer in logged.timers if timer.share is not None and timer.name in _OUTER]
    if large:
        words = " and ".join(f"{timer.name} is {percent(timer.share or 0)} of it" for timer in large)
        text += f" On the slowest rank, {words}."
    text += " The bubble cannot be computed: a log does not say when each task ran."
    return Verdict(text, ())


def remarks_on_log(logged: LoggedSteps, log: TrainingLog) -> list[Remark]:
    """Say what the numbers of a log are, and what it lacks."""
    found = []
    between = {b - a for a, b in pairwise(logged.steps)}
    if between - {1}:
        found.append(f"each line is the mean of the iterations since the line before, up to {max(between):,}")
    if logged.counted < len(logged.steps):
        found.append("the first line is left out of times and timers: it has the program's start in it")
    if logged.elapsed and logged.outside is not None and logged.outside / logged.elapsed >= _NOTED:
        share = percent(logged.outside / logged.elapsed)
        found.append(
            f"{time(logged.outside)} from the first of these lines to the last, {share}, are outside iterations: "
            "evaluation, checkpoints, pauses"
        )
    if logged.skipped or logged.nan:
        found.append(
            f"{count_of(logged.skipped, 'iteration')} skipped, {logged.nan:,} with a loss that is not finite; such "
            "losses are not in the log"
        )
    if not any(line.timers for line in log.iterations):
        found.append("no timers were logged, so where the time goes is not known; train with --timing-log-level 1 or 2")
    elif all(line.is_first for line in log.iterations):
        found.append("timers are left out: those of the first line may be divided by more iterations than it is about")
    return [Remark(None, text) for text in found]


def _timer(name: str, spreads: Sequence[tuple[float | None, float]], step: Summary | None) -> LoggedTimer:
    least = [least for least, _ in spreads if least is not None]
    most = _microseconds(median(most for _, most in spreads))
    return LoggedTimer(
        name=name,
        count=len(spreads),
        least=_microseconds(median(least)) if len(least) == len(spreads) else None,
        most=most,
        share=None if step is None else most / step.median,
    )


def _count(line: LoggedIteration, name: str) -> int:
    """Return a count that a line has, 0 if it has none that can be one."""
    value = line.values.get(name, 0.0)
    return int(value) if 0 <= value < _MOST else 0


def _between(lines: Sequence[LoggedIteration]) -> float | None:
    """Return the time from the first line to the last, if both have one and it is longer than nothing."""
    first, last = lines[0].time, lines[-1].time
    if first is None or last is None or last <= first:
        return None
    return (last - first).total_seconds() * 1e6


def _microseconds(milliseconds: float) -> float:
    return milliseconds * 1000
