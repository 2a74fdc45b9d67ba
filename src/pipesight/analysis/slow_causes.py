"""What slows a job, in words: causes are removed one after the other, and each is worth what its removal saves.

In each round, every possible cause is removed from a replay of its own; the one that saves most is named and stays
removed. So two causes never count the same time, and what remains in the end has no single cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from pipesight._formatting import rough_percent
from pipesight._plurals import plural
from pipesight.analysis.chance import beyond_chance
from pipesight.analysis.usual_durations import UsualDurations
from pipesight.runs.reading.event_tables import Column, Operations
from pipesight.runs.reading.operation_kinds import KINDS, codes_of, collectives, computing, number_of

__all__ = ["WORTH", "Cause", "CauseKind", "Fixes", "doing", "names_of", "verdict_of"]

CauseKind: TypeAlias = Literal["rank", "replica", "stage", "microbatches", "link", "collective", "messages", "jitter"]

WORTH = 0.05
"""The share of an ideal step that a cause must cost to be named."""
ROUNDS = 5
"""The most causes that are named."""
TOGETHER = 4
"""Scenarios that are replayed at once, for the memory that they take."""
MOSTLY = 0.7
"""The share of what a wider cause saves from which a narrower one is named instead."""
SLOWEST = 0.03
"""The share of workers that can be named at once, and that M_W makes ideal; at least one."""
LOCAL: tuple[CauseKind, ...] = ("rank", "replica", "link")
"""Of many ranks or links, some are the slowest by chance."""
ALIKE = 0.5
"""Of the slowest rank's excess, what another of the slowest 3% must have to be named with it."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that slows the job."""

    kind: CauseKind
    """What it is."""
    share: float
    """What removing it saves, as a share of an ideal step."""
    ranks: tuple[int, ...] = ()
    """The ranks that are slow, or the two ends of a link."""
    partitions: tuple[int, ...] = ()
    """The partition of each of these, where a rank has several workers."""
    replica: int | None = None
    """The data-parallel rank that is slow."""
    stage: int | None = None
    """The stage that is too long."""
    operation: str | None = None
    """The kind of operation that takes most of the time that is lost, if it is of one kind."""


@dataclass(frozen=True, slots=True, eq=False)
class _Fix:
    """A cause that can be removed; one that is ``wide`` is named only if nothing narrower is.

    One that is there ``by_chance`` is not named: some place loses as much on any busy machine.
    """

    cause: Cause
    make: Callable[[], Column]
    """Returns the durations without it."""
    wide: bool = False
    by_chance: bool = False


class Fixes:
    """What could be removed from a recording.

    ``recorded`` are durations, of communications without waiting. ``ideal`` is what communications take if nothing
    slows them, ``usual`` what computing takes then: ``before`` some step, if so, which lets a stage take longer by
    chance, too.
    """

    def __init__(
        self, operations: Operations, recorded: Column, ideal: Column, usual: UsualDurations, *, before: bool = False
    ) -> None:
        self._operations, self._recorded, self._ideal, self._usual = operations, recorded, ideal, usual
        self._before = before
        self._stages = int(operations.stage.max()) + 1
        self._worker = operations.replica.astype(np.int32) * self._stages + operations.stage
        self._workers = len(np.unique(self._worker))
        self._rank = np.full((int(operations.replica.max()) + 1) * self._stages, -1)  # -1: was not recorded
        self._rank[self._worker] = operations.rank
        self._computing = np.isin(operations.kind, computing())
        steps, self._step = np.unique(operations.step, return_inverse=True)
        self._steps = len(steps)

    def greedy(self, run: Callable[..., Column], *, now: float, ideal: float) -> tuple[Cause, ...]:
        """Remove the largest cause, then the largest that is left, and so on.

        ``run`` replays durations, and returns the mean step of each.
        """
        causes: list[Cause] = []
        noise = 0.0
        durations, usual = self._recorded, self._usual.usual
        while len(causes) < ROUNDS:
            fixes = list(self._fixes(durations, usual, {cause.kind for cause in causes}))
            shares: list[float] = []
            for first in range(0, len(fixes), TOGETHER):
                times = run(*(fix.make() for fix in fixes[first : first + TOGETHER]))
                shares += ((now - times) / max(ideal, 1e-9)).tolist()
            found = _best(fixes, shares, noise, LOCAL if not self._before else (*LOCAL, "stage"))
            if found is None:
                break
            fix, share = found
            noise = max(noise, share) if fix.wide else noise
            now -= share * ideal
            durations = fix.make()
            if fix.cause.kind == "stage":
                usual = self._usual.usual_even
            causes.append(replace(fix.cause, share=share))
        return tuple(causes)

    def _fixes(self, durations: Column, usual: Column, done: Collection[CauseKind]) -> Iterator[_Fix]:
        """Yield what may be removed next."""
        kind = self._operations.kind
        over = np.where(self._computing, durations - usual, 0.0)
        by_step = self._by_step(self._worker, over)
        if self._workers > 1:
            yield self._slow_ranks(durations, usual, over, by_step)
        has_replicas = len(self._rank) > self._stages
        if has_replicas and self._stages > 1:
            by_replica = by_step.reshape(-1, self._stages, self._steps).sum(axis=1)
            replica = int(by_replica.sum(axis=1).argmax())
            own = self._computing & (self._operations.replica == replica)
            cause, chance = Cause("replica", 0.0, replica=replica), self._is_chance(by_replica, replica)
            yield _Fix(cause, lambda: np.where(own, usual, durations), by_chance=chance)
        if "stage" not in done and self._stages > 1 and (has_replicas or not self._before):
            stage = int(self._usual.stages.argmax())
            yield _Fix(Cause("stage", 0.0, stage=stage), lambda: durations * self._usual.even_stages)
        if "microbatches" not in done:
            yield _Fix(Cause("microbatches", 0.0), lambda: durations * self._usual.even_microbatches)
        messages = np.isin(kind, codes_of("message"))
        if messages.any():
            yield from self._slow_link(durations, messages)
            yield _Fix(Cause("messages", 0.0), lambda: np.where(messages, self._ideal, durations), wide=True)
        for number in collectives():
            if (kind == number).any():
                cause = Cause("collective", 0.0, operation=KINDS[number].name)
                yield _Fix(cause, partial(self._with_ideal, durations, number))
        every = Cause("jitter", 0.0, operation=self._main_kind(over, self._computing))
        yield _Fix(every, lambda: np.where(self._computing, usual, durations), wide=True)

    def _main_kind(self, over: Column, own: Column) -> str | None:
        """Return the kind of operation that most of what is beyond the usual is lost in, if there is one."""
        lost = np.bincount(self._operations.kind[own], np.maximum(over[own], 0), len(KINDS))
        return KINDS[int(lost.argmax())].name if lost.max() > MOSTLY * lost.sum() else None

    def _with_ideal(self, durations: Column, kind: int) -> Column:
        return np.where(self._operations.kind == kind, self._ideal, durations)

    def _slow_ranks(self, durations: Column, usual: Column, over: Column, by_step: Column) -> _Fix:
        """The ranks that compute longest beyond what is usual, of the slowest 3%."""
        by_worker = by_step.sum(axis=1)
        most = np.argsort(-by_worker, kind="stable")[: max(1, round(SLOWEST * self._workers))]
        chance = self._is_chance(by_step, int(most[0]))
        most = most[by_worker[most] >= ALIKE * by_worker[most[0]]]  # none, if all are faster than usual
        own = self._computing & np.isin(self._worker, most)
        cause = Cause("rank", 0.0, tuple(self._rank[most].tolist()), operation=self._main_kind(over, own))
        return _Fix(cause, lambda: np.where(own, usual, durations), by_chance=chance)

    def _slow_link(self, durations: Column, messages: Column) -> Iterator[_Fix]:
        """The link whose messages take longest beyond the median of all, of those with two ends in the recording."""
        stage = self._operations.stage
        from_above = np.isin(self._operations.kind, [number_of("forward-recv"), number_of("backward-send")])
        lower = np.where(from_above, stage - 1, stage) % self._stages
        link = self._operations.replica.astype(np.int64) * self._stages + lower
        received = np.isin(self._operations.kind, [number_of("forward-recv"), number_of("backward-recv")])
        by_step = self._by_step(link, np.where(received, durations - self._ideal, 0.0))
        every = np.arange(len(self._rank))
        upper = every - every % self._stages + (every + 1) % self._stages
        known = (self._rank >= 0) & (self._rank[upper] >= 0) & (upper != every)
        if not known.any():
            return
        worst = int(np.where(known, by_step.sum(axis=1), -np.inf).argmax())
        own = messages & (link == worst)
        cause = Cause("link", 0.0, tuple(self._rank[[worst, upper[worst]]].tolist()))
        yield _Fix(cause, lambda: np.where(own, self._ideal, durations), by_chance=self._is_chance(by_step, worst))

    def _by_step(self, place: Column, over: Column) -> Column:
        """Return what each place loses in each step."""
        found = np.bincount(place * self._steps + self._step, over, len(self._rank) * self._steps)
        return found.reshape(-1, self._steps)

    def _is_chance(self, by_step: Column, place: int) -> bool:
        there = np.flatnonzero(by_step.any(axis=1))
        return place in there and not beyond_chance(
            by_step[there], int(np.searchsorted(there, place)), kinds=len(LOCAL)
        )


def _best(
    fixes: Sequence[_Fix], shares: Sequence[float], noise: float, local: Collection[CauseKind]
) -> tuple[_Fix, float] | None:
    """Return the cause to name next: the largest, a rank rather than its replica, and a wide one only if need be.

    Where computing, or messages, take longer at times everywhere, some rank or link is the worst by chance: one is
    named only if it loses most of what all of them do. ``noise`` is what wide causes that were removed lost; ``local``
    are the kinds to which this applies.
    """
    noise = max([noise, *(share for fix, share in zip(fixes, shares, strict=True) if fix.wide)])
    for wide in (False, True):
        worth = []
        for fix, share in zip(fixes, shares, strict=True):
            least = MOSTLY * noise if fix.cause.kind in local else 0.0
            if fix.wide == wide and not fix.by_chance and share >= max(WORTH, least):
                worth.append((fix, share))
        if not worth:
            continue
        found = max(worth, key=lambda entry: entry[1])
        if found[0].cause.kind == "replica":
            rank = next((entry for entry in worth if entry[0].cause.kind == "rank"), None)
            if rank is not None and rank[1] >= MOSTLY * found[1]:
                return rank
        return found
    return None


# Words.


def verdict_of(
    causes: Sequence[Cause],
    by_worker: Mapping[int, float],
    slowdown: float,
    *,
    stages: Sequence[int],
    partitions: Mapping[int, tuple[int, int]] | None = None,
) -> str:
    """Say how much slower the job is than without stragglers, and why.

    ``partitions`` has rank and partition of each worker, where these are not ranks.
    """
    if slowdown - 1 < WORTH and not causes:
        return f"No straggler costs {WORTH:.0%}: a step takes {slowdown:.2f} times as long as an ideal one."
    first = f"A step takes {slowdown:.2f} times as long as without stragglers"
    if slowdown - 1 < WORTH:
        first = "A step takes about as long as without stragglers"
    if not causes:
        return f"{first}, for no single cause."
    named = [_in_words(cause, by_worker, names_of(cause.ranks, partitions), stages) for cause in causes]
    share = next((k for k, cause in enumerate(causes) if cause.kind != "rank"), None)
    if share is not None:
        named[share] += " of an ideal step"
    words = "; ".join(named)
    more = ""
    if sum(cause.share for cause in causes) > slowdown - 1 + WORTH:
        more = " That is more than the whole slowdown: ideal durations are means, and slow calls are in them."
    return f"{first}. {words[0].upper()}{words[1:]}.{more}"


def names_of(workers: Sequence[int], partitions: Mapping[int, tuple[int, int]] | None = None) -> list[str]:
    """Name workers: by rank or, where workers are partitions, by these."""
    if partitions is None:
        return [f"rank {worker}" for worker in workers]
    several = len({rank for rank, _ in partitions.values()}) > 1
    own = [partitions[worker] for worker in workers]
    return [f"partition {part}" + f" of rank {rank}" * several for rank, part in own]


def doing(cause: Cause) -> str:
    """Say in brackets what a slow worker does, if it is not computing."""
    return "" if cause.operation in (None, "forward-compute", "backward-compute") else f" ({cause.operation})"


def _in_words(cause: Cause, by_worker: Mapping[int, float], who: Sequence[str], stages: Sequence[int]) -> str:
    """Name a cause, and what it costs: for ranks, how many times the job is slowed, otherwise the share of a step."""
    share = rough_percent(cause.share)
    if cause.kind == "rank":
        times = max(by_worker[worker] for worker in cause.ranks)
        return f"{' and '.join(who)} {plural(len(who), 'slows', 'slow')} the job by {times:.2f} times{doing(cause)}"
    if cause.kind == "replica":
        return f"data-parallel rank {cause.replica} is slow: {share}"
    if cause.kind == "stage":
        which = "the last stage" if cause.stage == stages[-1] else f"stage {cause.stage}"
        return f"{which} is too long: {share}"
    if cause.kind == "microbatches":
        return f"micro-batches differ: {share}"
    if cause.kind == "link":
        return f"the link between {who[0]} and {who[1]} is slow: {share}"
    what = f"computing{doing(cause)}" if cause.kind == "jitter" else cause.operation or "messages"
    return f"{what} {'take' if what in ('messages', 'collectives') else 'takes'} longer at times: {share}"
