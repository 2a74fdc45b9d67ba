"""The sends and receives between devices that follow from a schedule, and whether they can block each other.

Devices send their results in the order of their tasks. A receive is posted in the order in which messages are sent, so
a device may wait for one that it does not need yet::

    device 0   0F0 0SEND_F0 2RECV_F0 0F1 ...       2RECV_F0 waits for stage 1; where receives block, so does 0F1

What is checked here, besides that: that messages between two devices are received in the order in which they are
sent, and that devices do not wait for each other if a send takes until its receive is posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from pipesight.schedule.simulation import simulate
from pipesight.schedule.task_orders import B, F, R, Schedule, W

__all__ = ["Action", "EarlyReceive", "Kind", "early_receives", "message_problems", "with_messages"]


class Kind(StrEnum):
    """What a device does, under the names of torch.distributed.pipelining."""

    F = "F"
    """A forward."""
    I = "I"  # noqa: E741
    """The gradient of the input."""
    B = "B"
    """A whole backward."""
    W = "W"
    """The gradients of the weights."""
    SEND_F = "SEND_F"
    """The output goes to the next stage."""
    RECV_F = "RECV_F"
    """The input comes from the stage before."""
    SEND_B = "SEND_B"
    """The gradient of the input goes to the stage before."""
    RECV_B = "RECV_B"
    """The gradient of the output comes from the next stage."""


class Action(NamedTuple):
    """One thing that a device does."""

    kind: Kind
    """Task, send or receive."""
    stage: int
    """The stage that runs, sends or receives."""
    i: int
    """The micro-batch."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.i}"

    @property
    def peer(self) -> int:
        """Of a message, the stage at its other end."""
        return self.stage + (1 if self.kind in (Kind.SEND_F, Kind.RECV_B) else -1)


_SENT = {Kind.F: Kind.SEND_F, Kind.I: Kind.SEND_B, Kind.B: Kind.SEND_B}
_RECEIVED = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
_CONSUMED = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}


@dataclass(frozen=True, slots=True)
class EarlyReceive:
    """A receive that stands before a task which does not need it, and which could run earlier."""

    device: int
    """Where."""
    receive: Action
    """The receive, of a message that has not come yet."""
    task: Action
    """The task that could run."""

    def __str__(self) -> str:
        return f"device {self.device} receives {self.receive} before {self.task}, which does not need it"


def with_messages(schedule: Schedule) -> list[list[Action]]:
    """Return what each device does, with sends and receives where torch's runtime puts them.

    Raises:
        ValueError: Devices wait for each other.
    """
    homes, split = schedule.device_of_stage, schedule.split
    left = [deque(_tasks(row.tolist(), split.tolist())) for row in schedule.order]
    rows: list[list[Action]] = [[] for _ in left]
    there: set[tuple[int, Action]] = set()
    while any(left):
        progress = False
        for device, tasks in enumerate(left):
            if not tasks or not _is_ready(tasks[0], device, there, schedule.stages):
                continue
            task, progress = tasks.popleft(), True
            rows[device].append(task)
            sent = _SENT.get(task.kind)
            if sent is None:
                continue
            message = Action(sent, task.stage, task.i)
            if not 0 <= message.peer < schedule.stages:
                continue
            other, receive = homes[message.peer], Action(_RECEIVED[sent], message.peer, task.i)
            there.add((other, receive))
            if other != device:
                rows[device].append(message)
                rows[other].append(receive)
        if not progress:
            heads = [f"device {device} with {tasks[0]}" for device, tasks in enumerate(left) if tasks]
            raise ValueError(f"devices wait for each other: {', '.join(heads)}")
    return rows


def message_problems(rows: Sequence[Sequence[Action]]) -> list[str]:
    """Return what is wrong with sends and receives: too few of them, another order, or a deadlock if sends block."""
    homes = {action.stage: device for device, row in enumerate(rows) for action in row}
    found = []
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for device, row in enumerate(rows):
        for action in row:
            if action.kind in _RECEIVED:
                match = Action(_RECEIVED[action.kind], action.peer, action.i)
                sent.setdefault((device, homes.get(action.peer, -1)), []).append(match)
            elif action.kind in _RECEIVED.values():
                received.setdefault((homes.get(action.peer, -1), device), []).append(action)
    for pair in sorted({*sent, *received}):
        there, here = sent.get(pair, []), received.get(pair, [])
        if there != here:
            k = next((k for k, both in enumerate(zip(there, here, strict=False)) if both[0] != both[1]), None)
            where = f"from device {pair[0]} to device {pair[1]}"
            if k is None:
                found.append(f"{len(there)} messages are sent {where}, but {len(here)} received")
            else:
                found.append(f"message {k} {where} is for {there[k]}, but is received as {here[k]}")
    return found or _blocked(rows)


def early_receives(schedule: Schedule, rows: Sequence[Sequence[Action]] | None = None) -> list[EarlyReceive]:
    """Return the receives that delay a task if they block their device until the message has come.

    If each task takes one unit of time, the schedule says when messages come. ``rows`` are by default as in
    `with_messages`.
    """
    times = simulate(schedule, np.ones((4, 1, 1)))
    kinds = {Kind.F: F, Kind.I: B, Kind.B: B, Kind.W: W}
    found = []
    for device, row in enumerate(with_messages(schedule) if rows is None else rows):
        open_: dict[Action, float] = {}
        for action in row:
            if action.kind in _RECEIVED.values():
                of = F if action.kind == Kind.RECV_F else B
                open_[action] = float(times.end[of, action.peer, action.i])
            elif action.kind in kinds:
                if (needed := _CONSUMED.get(action.kind)) is not None:
                    open_.pop(Action(needed, action.stage, action.i), None)
                begin = float(times.begin[kinds[action.kind], action.stage, action.i])
                late = [receive for receive, comes in open_.items() if comes > begin]
                found += [EarlyReceive(device, receive, action) for receive in late[:1]]
    return found


def _tasks(row: Iterable[Sequence[int]], split: list[list[bool]]) -> Iterable[Action]:
    for kind, stage, i in row:
        if kind == F:
            yield Action(Kind.F, stage, i)
        elif kind == B:
            yield Action(Kind.I if split[stage][i] else Kind.B, stage, i)
        elif kind == W:
            yield Action(Kind.W, stage, i)
        else:
            assert kind in (R, -1)


def _is_ready(task: Action, device: int, there: set[tuple[int, Action]], stages: int) -> bool:
    needed = _CONSUMED.get(task.kind)
    first = 0 if task.kind == Kind.F else stages - 1
    return needed is None or task.stage == first or (device, Action(needed, task.stage, task.i)) in there


def _blocked(rows: Sequence[Sequence[Action]]) -> list[str]:
    """Return the deadlock there is if each send takes until its receive is posted, and each receive until its send."""
    at = [0] * len(rows)
    progress = True
    while progress:
        progress = False
        heads = {row[at[device]]: device for device, row in enumerate(rows) if at[device] < len(row)}
        for action, device in heads.items():
            if action.kind in _RECEIVED:
                match = Action(_RECEIVED[action.kind], action.peer, action.i)
                if match in heads:
                    at[device] += 1
                    at[heads[match]] += 1
                    progress = True
            elif action.kind not in _RECEIVED.values():
                at[device] += 1
                progress = True
    stuck = [f"device {d} with {row[at[d]]}" for d, row in enumerate(rows) if at[d] < len(row)]
    return [f"devices wait for each other if sends block: {', '.join(stuck)}"] if stuck else []
