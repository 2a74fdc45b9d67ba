"""Links between ranks: how long messages take on each, and what waiting for them costs.

A message is what a task hands on to the same micro-batch in the next partition, or in the one before. It is sent when
the task ends, and there when the receiver stops waiting for it::

    sender    | task |                     sent
    receiver     | waits ...............| task |
                     |<-- on its way -->|  there

How long it took is known if the receiver waited already when it was sent; otherwise it may have been there for long.
What was waited after it was sent is lost to the link; what was waited before, to the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipesight.analysis.clock_errors import clock_error
from pipesight.analysis.step_grouping import MiniBatchTable
from pipesight.analysis.step_times import StepTimes
from pipesight.analysis.transfer_waits import arrivals_of
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD
from pipesight.runs.reading.event_tables import Column, Table, Tasks, Transfers

__all__ = ["LinkReport", "Messages", "SlowConnection", "find_links", "messages_of", "slow_connections"]

SLOWER = 3.0
"""A link is slow from this many times the median of links between others."""
WORTH = 0.01
"""The share of the step that a slow link must cost to be named."""
MUCH = 0.05
"""The share of the step that any other link between hosts must cost to be named."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The connection from one rank to another. Times are microseconds."""

    source: int
    """The rank that sends."""
    target: int
    """The rank that receives."""
    source_host: str | None
    """Its host, if it is known."""
    target_host: str | None
    """Its host, if it is known."""
    replica: int
    """The replica of both ranks."""
    partitions: tuple[int, ...]
    """Those that receive the tensors."""
    messages: int
    """In the steps that count."""
    bytes: int
    """Of all of them."""
    size: float
    """Bytes of one, at the median of those that were timed."""
    timed: int
    """Messages that the receiver was already waiting for when they were sent."""
    time: float | None
    """How long these took, at the median; ``None`` if there are none."""
    others: float | None
    """The same of links between other ranks or, from host to host, between other hosts: the median over them."""
    error: float | None
    """The error of ``time``, from the clocks of both ranks; ``None`` if these were not compared."""
    wait: float
    """How long the receiver waits, in the mean step, for messages that were already sent."""
    share: float
    """Of the mean step."""
    bandwidth: float | None
    """Bytes per second of the messages that were timed, latency included; ``None`` if they took no time."""
    overlap: float | None
    """The share of the time on the way that nobody waits for, if every message takes ``time``; ``None`` without it."""
    notable: bool = False
    """Whether the report names it: it is much slower than others, or costs much, beyond the error of the clocks."""

    @property
    def ends(self) -> tuple[str | int, ...]:
        """What it connects, in either direction: hosts or, on one host, ranks."""
        hosts = {host for host in (self.source_host, self.target_host) if host is not None}
        return tuple(sorted(hosts)) if len(hosts) == 2 else tuple(sorted((self.source, self.target)))


@dataclass(frozen=True, slots=True)
class SlowConnection:
    """Two hosts, or two ranks of one, with a notable link between them."""

    cpu_check: str
    """What to check, in words."""
    gpu_check: str
    """The same if the ranks compute on GPUs."""
    slowest: LinkReport
    share: float
    """The share of the step that waiting costs, in both directions, over all ranks of a replica."""


def find_links(
    minibatches: MiniBatchTable, tasks: Tasks, transfers: Transfers, times: StepTimes, description: Mapping[str, Any]
) -> tuple[LinkReport, ...]:
    """Return the links that tensors came over, those that cost most first."""
    messages = messages_of(minibatches, tasks, transfers)
    periods = {number: times.period[times.replica == number] for number in np.unique(times.replica).tolist()}
    found = []
    for source, target in np.unique(np.stack([messages.source, messages.target], axis=1), axis=0).tolist():
        own = messages.where((messages.source == source) & (messages.target == target))
        replica = int(minibatches.replica[own.row[0]])
        timed = own.where(own.waiting)
        period = periods.get(replica, np.zeros(0))
        wait = float(own.wait.sum()) / max(len(period), 1)
        time = float(np.median(timed.time)) if len(timed) else None
        spent = float(np.maximum(timed.time, 0).sum())
        found.append(
            LinkReport(
                source=source,
                target=target,
                source_host=_host(description, source),
                target_host=_host(description, target),
                replica=replica,
                partitions=tuple(np.unique(own.partition).tolist()),
                messages=len(own),
                bytes=int(own.size.sum()),
                size=float(np.median(timed.size if len(timed) else own.size)),
                timed=len(timed),
                time=time,
                others=None,
                error=clock_error(description, source, target),
                wait=wait,
                share=min(wait / max(float(period.mean()), 1e-9), 1.0) if len(period) else 0.0,
                bandwidth=float(timed.size.sum()) / spent * 1e6 if spent > 0 else None,
                overlap=max(1 - float(own.wait.sum()) / (time * len(own)), 0.0)
                if time is not None and time > 0
                else None,
            )
        )
    compared = [replace(link, others=_others(link, found)) for link in found]
    longest = max((link.time for link in compared if link.time is not None), default=0.0)
    judged = [replace(link, notable=_is_notable(link, longest)) for link in compared]
    return tuple(sorted(judged, key=lambda link: (-link.share, link.source, link.target)))


def _is_notable(link: LinkReport, longest: float) -> bool:
    if link.time is None or link.error is None or link.time <= link.error:
        return False
    if link.others is not None and link.time >= SLOWER * link.others:
        return link.share >= WORTH
    if link.others is not None and link.source_host == link.target_host is not None:
        return False  # on one host, where others are as fast, no network is slow
    # Next to one that is much slower, it is not the one to look at.
    return link.share >= MUCH and SLOWER * link.time > longest


def _others(link: LinkReport, links: Sequence[LinkReport]) -> float | None:
    times = [other.time for other in links if other.ends != link.ends and other.time is not None]
    return float(np.median(times)) if times else None


def slow_connections(links: Sequence[LinkReport]) -> Iterator[SlowConnection]:
    """Put notable links between the same hosts, or the same ranks, together."""
    notable = [link for link in links if link.notable]
    for ends in dict.fromkeys(link.ends for link in notable):
        own = [link for link in notable if link.ends == ends]
        shares: dict[int, float] = {}
        for link in own:
            shares[link.replica] = shares.get(link.replica, 0.0) + link.share
        slowest = max(own, key=lambda link: link.time or 0.0)
        host, one, other = slowest.target_host, *ends
        if isinstance(one, str):
            cpus = gpus = f"the network between {one} and {other}"
        elif host is not None and slowest.source_host == host:  # no network
            cpus = f"that rank {one} and rank {other} on {host} have processor cores of their own"
            gpus = f"how the GPUs of rank {one} and rank {other} on {host} are connected, with nvidia-smi topo -m"
        else:
            cpus = gpus = f"the connection between rank {one} and rank {other}"
        yield SlowConnection(cpus, gpus, slowest, min(max(shares.values()), 1.0))


# Messages.


@dataclass(frozen=True, slots=True, eq=False)
class Messages(Table):
    """Messages between tasks of different ranks, one per row."""

    row: Column
    """Of the mini-batches."""
    source: Column
    target: Column
    partition: Column
    size: Column
    time: Column
    """From the end of the sender's task to the end of the wait: less than 0 where clocks are off by more."""
    waiting: Column
    """Whether the receiver was already waiting when it was sent."""
    wait: Column
    """How long the receiver waited for it after that."""


def messages_of(minibatches: MiniBatchTable, tasks: Tasks, transfers: Transfers) -> Messages:
    """Return the messages that were waited for in mini-batches; ``tasks`` is the table that those were found in."""
    arrivals = arrivals_of(minibatches, tasks, transfers)
    if not len(arrivals):
        return Messages(*[np.zeros(0, np.int64)] * 8)
    grid = _Grid(minibatches, tasks)
    row, j, i = arrivals.minibatch, arrivals.partition, arrivals.microbatch
    mine = grid.find(row, FORWARD, j, i)
    forward = (mine >= 0) & (arrivals.begin <= grid.begin[mine])
    sent_by = np.where(forward, grid.find(row, FORWARD, j - 1, i), grid.find(row, BACKWARD, j + 1, i))
    known = (sent_by >= 0) & (grid.rank[sent_by] != arrivals.rank)
    arrivals, sent_by, forward = arrivals.where(known), sent_by[known], forward[known]
    # Several tensors may make up a message: it is there when all of them are.
    _, first, which = np.unique(sent_by * 2 + forward, return_index=True, return_inverse=True)
    which = which.ravel()
    begin, end = arrivals.begin[first], arrivals.end[first]
    np.minimum.at(begin, which, arrivals.begin)
    np.maximum.at(end, which, arrivals.end)
    sent = grid.end[sent_by[first]]
    return Messages(
        row=arrivals.minibatch[first],
        source=grid.rank[sent_by[first]].astype(np.int64),
        target=arrivals.rank[first].astype(np.int64),
        partition=arrivals.partition[first],
        size=np.bincount(which, np.maximum(arrivals.size, 0), len(first)).astype(np.int64),
        time=end - sent,
        waiting=begin <= sent,
        wait=np.maximum(end - np.maximum(begin, sent), 0),
    )


class _Grid:
    """The tasks of some mini-batches, to be found by what they are; times are from the beginning of each."""

    def __init__(self, minibatches: MiniBatchTable, tasks: Tasks) -> None:
        row = np.repeat(np.arange(len(minibatches)), minibatches.count)
        start = np.cumsum(minibatches.count) - minibatches.count
        place = np.repeat(minibatches.first - start, minibatches.count) + np.arange(len(row))
        own = tasks.where(place)
        self._n = int(own.partition.max(initial=0)) + 1
        self._m = int(own.microbatch.max(initial=0)) + 1
        code = self._code(row, own.phase, own.partition, own.microbatch)
        order = np.argsort(code, kind="stable")
        self._codes = code[order]
        self.rank = own.rank[order]
        self.begin = (own.begin - minibatches.begin[row])[order]
        self.end = (own.end - minibatches.begin[row])[order]

    def _code(self, row: Column, phase: Column | int, partition: Column, microbatch: Column) -> Column:
        lane = (row.astype(np.int64) * 4 + phase) * self._n + partition
        code: Column = lane * self._m + microbatch
        return code

    def find(self, row: Column, phase: int, partition: Column, microbatch: Column) -> Column:
        """Return the numbers of tasks, -1 where there is none."""
        code = self._code(row, phase, partition, microbatch)
        at = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        inside = (partition >= 0) & (partition < self._n) & (microbatch >= 0) & (microbatch < self._m)
        found: Column = np.where(inside & (self._codes[at] == code), at, -1)
        return found


# What the run says of its ranks.


def _host(description: Mapping[str, Any], rank: int) -> str | None:
    hosts = description.get("host_of_rank")
    name = hosts.get(rank) if isinstance(hosts, dict) else None
    return name if isinstance(name, str) else None
