"""A change of pace: since which step a job that is running takes longer, and what does, compared with before.

Each of the last steps is compared with each of those before: if it takes longer far more often than chance explains,
the pace has changed. Then both are replayed, and a cause is named by how much more it costs than before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipesight._formatting import rough_percent, time
from pipesight.analysis.chance import alike
from pipesight.analysis.recorded_operations import RecordedOperations
from pipesight.analysis.slow_causes import WORTH, Cause, Fixes, doing, names_of
from pipesight.analysis.step_times import StepTimes
from pipesight.analysis.usual_durations import usual_before
from pipesight.analysis.what_if import Replays
from pipesight.runs.reading.event_tables import Column, Operations

__all__ = ["PaceChange", "pace_change", "slower_since"]

FEWEST = 8
"""The fewest steps since a change, and before it."""
SURE = 4.5
"""Standard deviations of chance from which the last steps take longer than those before."""
REPLAYED = 20
"""The most steps that are replayed, of those since a change and of those before it."""


@dataclass(frozen=True, slots=True)
class PaceChange:
    """Steps that take longer than those before. Times are microseconds."""

    since: int
    """The first of them."""
    before: float
    """The median step before."""
    now: float
    """The median step since."""
    causes: tuple[Cause, ...]
    """What takes longer, the largest first; ``share`` is of a step before. Empty if the recording does not show it."""
    text: str
    """The same in words."""


def slower_since(period: Column) -> int | None:
    """Return from which of some consecutive steps on they take longer than before, if they do.

    >>> slower_since(np.array([10, 11] * 10 + [14, 13] * 5))
    20
    """
    count = len(period)
    if count < 2 * FEWEST:
        return None
    longer = (period[None, :] > period[:, None]) + 0.5 * (period[None, :] == period[:, None])
    wins = np.zeros((count + 1, count + 1))
    wins[1:, :count] = longer[:, ::-1].cumsum(axis=0).cumsum(axis=1)[:, ::-1]
    split = np.arange(FEWEST, count - FEWEST + 1)
    before, after = split, count - split
    sure = (wins[split, split] - before * after / 2) / np.sqrt(before * after * (count + 1) / 12)
    found = int(split[sure.argmax()])
    is_longer = np.median(period[found:]) >= (1 + WORTH) * np.median(period[:found])
    return found if sure.max() >= SURE and is_longer and not _wanders(period, found) else None


def _wanders(period: Column, split: int) -> bool:
    """Whether steps are so like the step before them that their means differ as much without any change."""
    parts = period[:split], period[split:]
    apart = [part - np.median(part) for part in parts]
    most = 4 * max(float(np.median(np.abs(np.concatenate(apart)))), 1e-9)
    apart = [np.clip(part, -most, most) for part in apart]  # a few long steps are no noise
    squares = sum(float((part**2).sum()) for part in apart)
    count = len(period)
    likeness = alike([np.concatenate(apart)])
    spread = np.sqrt(squares / count * (1 / split + 1 / (count - split)) * (1 + likeness) / (1 - likeness))
    return bool(np.median(parts[1]) - np.median(parts[0]) < SURE * spread)


def pace_change(times: StepTimes, recorded: Callable[[Column], RecordedOperations | None]) -> PaceChange | None:
    """Return since when the last steps take longer than those before, and why; ``None`` if they do not.

    ``times`` are those of the steps that are kept, without warm-up.
    """
    steps = times.over_replicas()
    steps = steps.where(np.flatnonzero(steps.follows))  # others end early
    first = slower_since(steps.period)
    if first is None:
        return None
    since = int(steps.step[first])
    before, now = (float(np.median(period)) for period in (steps.period[:first], steps.period[first:]))
    replayed = recorded(np.concatenate([steps.step[:first][-REPLAYED:], steps.step[first:][-REPLAYED:]]))
    causes: tuple[Cause, ...] = ()
    named: Mapping[int, tuple[int, int]] | None = None
    if replayed is not None:
        named = replayed.partition_of_worker
        causes = _causes(replayed.operations, since)
    text = f"Since step {since}, steps take {now / before:.2f} times as long: {time(now)} instead of {time(before)}. "
    text += _in_words(causes, named) if causes else "The recording does not show why."
    return PaceChange(since, before, now, causes, text)


def _causes(operations: Operations, since: int) -> tuple[Cause, ...]:
    """Return what costs more since a step, as far as replays show it."""
    early = operations.step < since
    if early.all() or not early.any():
        return ()
    before, after = operations.where(early), operations.where(~early)
    try:
        was, now = Replays(before), Replays(after)
    except ValueError:  # they contradict each other
        return ()
    usual_was, usual_now = usual_before(before, was.durations, after, now.durations)
    step = float(was.run_whole(was.durations)[0])
    found = []
    for own, replays, usual in ((before, was, usual_was), (after, now, usual_now)):
        fixes = Fixes(own, replays.durations, usual.usual, usual, before=True)
        found.append(fixes.greedy(replays.run_whole, now=float(replays.run_whole(replays.durations)[0]), ideal=step))
    known = {_same(cause): cause.share for cause in found[0]}
    more = [replace(cause, share=cause.share - known.get(_same(cause), 0.0)) for cause in found[1]]
    return tuple(sorted((cause for cause in more if cause.share >= WORTH), key=lambda cause: -cause.share))


def _same(cause: Cause) -> tuple[object, ...]:
    """Return what tells a cause from others; a rank is one cause, whatever it does."""
    return cause.kind, cause.ranks, cause.replica, cause.stage, cause.kind == "collective" and cause.operation


def _in_words(causes: Sequence[Cause], partitions: Mapping[int, tuple[int, int]] | None) -> str:
    words = [f"{_who(cause, partitions)}: {rough_percent(cause.share)}" for cause in causes]
    words[0] = words[0][0].upper() + words[0][1:]
    return f"{'; '.join(words)} of a step before."


def _who(cause: Cause, partitions: Mapping[int, tuple[int, int]] | None) -> str:
    who = names_of(cause.ranks, partitions)
    match cause.kind:
        case "rank":
            return f"{' and '.join(who)} {'takes' if len(who) == 1 else 'take'} longer{doing(cause)}"
        case "replica":
            return f"data-parallel rank {cause.replica} takes longer"
        case "stage":
            return f"stage {cause.stage} takes longer on all replicas"
        case "microbatches":
            return "micro-batches differ"
        case "link":
            return f"the link between {who[0]} and {who[1]} is slower"
        case "collective":
            return f"the operation {cause.operation} takes longer"
        case "messages":
            return "messages take longer on all links"
        case _:
            return f"computing takes longer everywhere{doing(cause)}"
