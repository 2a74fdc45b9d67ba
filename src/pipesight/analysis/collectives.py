"""Collectives: which calls of ranks belong together, who came last, and how long the others waited for that one.

A rank arrives when it makes the call, or starts it in the background; it waits until the last one is there, and after
that for the network::

    rank 0   | all_reduce .............:====|
    rank 1          | all_reduce ......:====|       . waits for rank 2, whatever that does
    rank 2                             |====|       = communication

Calls are matched by their order within a step. Where ranks made different numbers of them, as some were not recorded,
or clocks say that a call ended before another of the same began, nothing is said of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesight.analysis.clock_errors import clock_error
from pipesight.runs.reading.event_tables import Column, Communications, Table

__all__ = ["BackgroundCalls", "Collective", "MatchedCalls", "WaitTable"]
__all__ += ["background_calls", "match_calls", "name_collectives", "waits_in"]

_WAIT = ".wait"
_FROM_ONE_TO_ONE = ("send", "receive")
_SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclass(frozen=True, slots=True, eq=False)
class WaitTable(Table):
    """Times that a rank waited for another, the cause."""

    rank: Column
    begin: Column
    end: Column
    cause: Column


@dataclass(frozen=True, slots=True, eq=False)
class BackgroundCalls(Table):
    """What ran beside the main thread of a rank: calls that it started, and waited for later."""

    rank: Column
    """The rank."""
    name: Column
    """The function, such as `all_reduce`."""
    begin: Column
    """When it was started, or when the one before it in the same group was done."""
    end: Column
    """When the rank knew that it was done."""
    started: Column
    """When it was started."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchedCalls:
    """All calls of one collective in one group. Times are by rank, in the order of ``ranks``, and call."""

    name: str
    ranks: tuple[int, ...]
    step: Column
    size: Column
    arrived: Column
    begin: Column
    """When the rank starts to wait; the same as ``arrived`` if the call itself waits."""
    end: Column
    error: Column
    """The error of times between two ranks, by both, in microseconds; infinite if it is not known."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a group, over the steps that count. Times are the mean of one call, in microseconds."""

    name: str
    """The function, such as `all_reduce`."""
    ranks: tuple[int, ...]
    """The ranks of its group."""
    calls: int
    """How many calls there were, each counted once for all ranks."""
    bytes: float
    """The median size of a call; -1 if it was not recorded."""
    time: float
    """How long the rank that arrives last spends in it: communication."""
    wait: float
    """How long the others wait for the last one."""
    last: int | None
    """The rank that arrived last most often; ``None`` if the clocks are too inaccurate to tell."""
    last_share: float
    """The share of calls in which it arrived last."""
    bandwidth: float | None
    """Bytes per second once all are there; ``None`` if sizes were not recorded, or it took no time."""
    overlap: float
    """The share of that time in which ranks do something else, as the call runs in the background; an upper limit, as
    it is not known when a call ended that nobody waited for yet."""


def match_calls(calls: Communications, description: Mapping[str, Any]) -> list[MatchedCalls]:
    """Match the calls of ranks."""
    world = description.get("world_size")
    is_wait = np.array([str(name).endswith(_WAIT) for name in calls.name.tolist()], bool)
    names = np.array([str(name).removesuffix(_WAIT) for name in calls.name.tolist()], object)
    groups = {*zip(names.tolist(), calls.peers.tolist(), strict=True)}
    found = []
    for name, peers in sorted(groups):
        ranks = _members(str(peers), world, calls.rank)
        if name in _FROM_ONE_TO_ONE or len(ranks) < 2:
            continue
        mine = (names == name) & (calls.peers == peers)
        own = [
            _apart(calls.where(mine & (calls.rank == r) & ~is_wait), calls.where(mine & (calls.rank == r) & is_wait))
            for r in ranks
        ]
        error = np.array([[_error(description, a, b) for b in ranks] for a in ranks])
        for matched in (
            _matched([at_once for at_once, _, _ in own]),
            _matched([started for _, started, _ in own], [waits for _, _, waits in own]),
        ):
            if matched is not None:
                found.append(_plausible(MatchedCalls(name, ranks, *matched, error)))
    return [meeting for meeting in found if len(meeting.step)]


def background_calls(calls: Communications) -> BackgroundCalls:
    """Return what ran in the background, by rank and begin: calls that were waited for later."""
    is_wait = np.array([str(name).endswith(_WAIT) for name in calls.name.tolist()], bool)
    names = np.array([str(name).removesuffix(_WAIT) for name in calls.name.tolist()], object)
    found = []
    for name, peers, rank in sorted({*zip(names.tolist(), calls.peers.tolist(), calls.rank.tolist(), strict=True)}):
        mine = (names == name) & (calls.peers == peers) & (calls.rank == rank)
        _, launches, waits = _apart(calls.where(mine & ~is_wait), calls.where(mine & is_wait))
        if not len(launches):
            continue
        before = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(waits.end)[:-1])
        begin = np.minimum(np.maximum(launches.begin, before), waits.end)
        found.append(
            BackgroundCalls(launches.rank, np.full(len(begin), name, object), begin, waits.end, launches.begin)
        )
    whole = BackgroundCalls.joined(*found) if found else BackgroundCalls.empty()
    return whole.where(np.lexsort((whole.begin, whole.rank)))


def _members(peers: str, world: object, ranks: Column) -> tuple[int, ...]:
    if peers == "world":
        count = world if isinstance(world, int) else int(ranks.max(initial=-1)) + 1
        return tuple(range(count))
    parts = peers.split(",")
    return tuple(sorted(map(int, parts))) if all(part.isdecimal() for part in parts) else ()


def _error(description: Mapping[str, Any], one: int, other: int) -> float:
    error = 0.0 if one == other else clock_error(description, one, other)
    return np.inf if error is None else error


def _apart(launches: Communications, waits: Communications) -> tuple[Communications, Communications, Communications]:
    """Return a rank's calls that waited at once, those that were waited for later, and these waits, by step and begin.

    A call and its wait are of one size. Where a step waited for some calls of a size, but not for as many as it made,
    it is not known which: the step is left out.
    """
    keys = np.stack([np.append(launches.step, waits.step), np.append(launches.size, waits.size)])
    (steps, _), which = np.unique(keys, axis=1, return_inverse=True)
    of_launch, of_wait = np.split(which.ravel(), [len(launches)])
    made, waited = (np.bincount(rows, minlength=len(steps)) for rows in (of_launch, of_wait))
    unknown = steps[(waited > 0) & (waited != made)]
    known, later = ~np.isin(launches.step, unknown), waited[of_launch] > 0
    return (
        _in_order(launches.where(known & ~later)),
        _in_order(launches.where(known & later)),
        _in_order(waits.where(~np.isin(waits.step, unknown))),
    )


def _matched(
    own: Sequence[Communications], waits: Sequence[Communications] | None = None
) -> tuple[Column, Column, Column, Column, Column] | None:
    """Return step and size, and by rank arrival, begin and end, of calls that all made equally often in a step.

    ``waits`` has the wait for each call; by default, the call itself waits.
    """
    counts = [
        dict(zip(*(column.tolist() for column in np.unique(calls.step, return_counts=True)), strict=True))
        for calls in own
    ]
    common = [step for step, count in counts[0].items() if all(other.get(step) == count for other in counts)]
    if not common:
        return None
    made = [calls.where(np.isin(calls.step, common)) for calls in own]
    waited = made if waits is None else [calls.where(np.isin(calls.step, common)) for calls in waits]
    arrived = np.stack([calls.begin for calls in made])
    begin, end = (np.stack([getattr(calls, name) for calls in waited]) for name in ("begin", "end"))
    return made[0].step, made[0].size, arrived, begin, end


def _in_order(calls: Communications) -> Communications:
    return calls.where(np.lexsort((calls.begin, calls.step)))


def _plausible(meeting: MatchedCalls) -> MatchedCalls:
    """Drop calls that ended on one rank before another arrived, by more than the error of the clocks."""
    if not meeting.name.startswith(_SYNCHRONISING):
        return meeting
    early = (meeting.arrived.max(axis=0) - meeting.end.min(axis=0)) > meeting.error.max()
    return _some(meeting, ~early)


def _some(meeting: MatchedCalls, rows: Column) -> MatchedCalls:
    parts = (meeting.arrived[:, rows], meeting.begin[:, rows], meeting.end[:, rows])
    return MatchedCalls(meeting.name, meeting.ranks, meeting.step[rows], meeting.size[rows], *parts, meeting.error)


def waits_in(meetings: Sequence[MatchedCalls]) -> WaitTable:
    """Return the times that ranks waited for the last one to arrive, where the clocks are accurate enough to tell."""
    found = [WaitTable.of(**dict.fromkeys(("rank", "begin", "end", "cause"), np.zeros(0, np.int64)))]
    found += [piece for meeting in meetings for piece in _waits(meeting)]
    return WaitTable.joined(*found)


def _waits(meeting: MatchedCalls) -> Iterator[WaitTable]:
    ranks = np.array(meeting.ranks, np.int64)
    for k, rank in enumerate(meeting.ranks):
        # A rank whose call ended did not wait for those that arrived later, as in a broadcast.
        there = meeting.arrived <= meeting.end[k]
        last = np.argmax(np.where(there, meeting.arrived, np.iinfo(np.int64).min), axis=0)
        until = np.minimum(np.take_along_axis(meeting.arrived, last[None], axis=0)[0], meeting.end[k])
        certain = (last != k) & (until - meeting.begin[k] > meeting.error[k, last])
        if certain.any():
            begin, end = meeting.begin[k][certain], until[certain]
            yield WaitTable(np.full(len(begin), rank, np.int64), begin, end, ranks[last[certain]])


def name_collectives(meetings: Sequence[MatchedCalls], steps: Column) -> tuple[Collective, ...]:
    """Name the collectives of some steps, those that take longest first."""
    found = []
    for whole in meetings:
        meeting = _some(whole, np.isin(whole.step, steps))
        if not len(meeting.step):
            continue
        last = np.argmax(meeting.arrived, axis=0)
        latest = meeting.arrived.max(axis=0)
        others = np.sort(meeting.arrived, axis=0)[-2]
        first = int(np.bincount(last).argmax())
        error = float(np.delete(meeting.error[first], first).min())
        sure = (last == first) & (latest - others > error)
        end = np.take_along_axis(meeting.end, last[None], axis=0)[0]
        wait = np.maximum(np.minimum(latest, meeting.end) - meeting.begin, 0).sum(axis=0) / (len(meeting.ranks) - 1)
        moving = np.maximum(end - latest, 0)
        there = np.minimum(latest, meeting.end)
        behind = np.clip(meeting.begin - there, 0, None).sum()
        found.append(
            Collective(
                name=meeting.name,
                ranks=meeting.ranks,
                calls=len(meeting.step),
                bytes=float(np.median(meeting.size)),
                time=float(moving.mean()),
                wait=float(wait.mean()),
                last=meeting.ranks[first] if sure.any() else None,
                last_share=float(sure.mean()),
                bandwidth=_bandwidth(meeting.size, moving),
                overlap=min(float(behind / max((meeting.end - there).sum(), 1)), 1.0),
            )
        )
    return tuple(sorted(found, key=lambda entry: (-entry.calls * (entry.time + entry.wait), entry.name, entry.ranks)))


def _bandwidth(size: Column, time: Column) -> float | None:
    known = size >= 0
    moved, spent = float(size[known].sum()), float(time[known].sum())
    return moved / spent * 1e6 if moved > 0 and spent > 0 else None
