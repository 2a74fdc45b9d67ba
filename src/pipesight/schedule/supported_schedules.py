"""The schedules that run over ranks: their names, what they require, and which rank has which partition.

With 2 ranks and 4 partitions, the ranks have the partitions

- one each: gpipe, 1f1b (2 partitions)         0 | 1
- in a loop: interleaved, looped BFS           0 2 | 1 3
- in a V: ZBV, DualPipeV, V-Half, V-Min        0 3 | 1 2
- as an order of your own has them
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from pipesight.schedule.csv_format import schedule_to_csv
from pipesight.schedule.task_orders import Schedule, gpipe
from pipesight.schedule.v_memory_orders import v_half, v_min

__all__ = ["SCHEDULES", "RankSchedule", "by_name", "of_order"]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """One schedule, and what runs it: a class of torch.distributed.pipelining, or its runtime, given the order."""

    name: str
    torch_name: str
    """That of the class; empty if there is none."""
    placement: Literal["one each", "loop", "v", "own"]
    rule: Callable[[int, int, int], str | None]
    """Given micro-batches, ranks and partitions, returns what is wrong and how to fix it, or ``None``."""
    stand_in: str
    """The schedule for batches that are too small for this one. It gives the same gradients."""
    splits: bool = False
    """Whether it splits backwards into the gradients of inputs and those of weights."""
    build: Callable[[int, int], Schedule] | None = None
    """Makes the order for so many partitions and micro-batches, where torch has no class."""
    order: Schedule | None = None
    """An order of one's own."""

    @property
    def identity(self) -> str:
        """What all ranks must have in common: the name and, of an order of one's own, a digest of its tasks."""
        if self.order is None:
            return self.name
        return f"{self.name} ({hashlib.blake2b(schedule_to_csv(self.order).encode(), digest_size=4).hexdigest()})"

    def partitions_of(self, rank: int, ranks: int, partitions: int) -> list[int]:
        """Return the partitions of a rank."""
        if self.order is not None:
            return [j for j, home in enumerate(self.order.device_of_stage) if home == rank]
        if self.placement == "v":
            return [rank, 2 * ranks - 1 - rank]
        return list(range(rank, partitions, ranks))

    def rank_of(self, partition: int, ranks: int) -> int:
        """Return the rank that has a partition."""
        if self.order is not None:
            return self.order.device_of_stage[partition]
        turn, place = divmod(partition, ranks)
        return ranks - 1 - place if self.placement == "v" and turn % 2 else place

    def check(self, chunks: int, ranks: int, partitions: int) -> None:
        """Raise ``ValueError`` unless the partitions fit the ranks, and the chunks the schedule."""
        if self.order is not None and (partitions, ranks) != (self.order.stages, self.order.devices):
            raise ValueError(
                f"schedule '{self.name}' is an order of {self.order.stages} partitions on {self.order.devices} ranks "
                f"(partitions: {partitions}, ranks: {ranks}); give balance {self.order.stages} numbers or cuts "
                f"{self.order.stages - 1} names, and start {self.order.devices} processes"
            )
        if self.placement == "one each" and partitions != ranks:
            several = partitions > ranks and partitions % ranks == 0
            other = (
                "use a schedule with several per rank: schedule='interleaved-1f1b'"
                if several
                else f"start as many processes as partitions: --nproc-per-node {partitions}"
            )
            raise ValueError(
                f"schedule '{self.name}' needs one partition per rank (partitions: {partitions}, ranks: {ranks}); give "
                f"balance {ranks} numbers or cuts {ranks - 1} names, or {other}"
            )
        if self.placement == "v" and partitions != 2 * ranks:
            raise ValueError(
                f"schedule '{self.name}' needs two partitions per rank (partitions: {partitions}, ranks: {ranks}); "
                f"give balance {2 * ranks} numbers or cuts {2 * ranks - 1} names"
            )
        if partitions % ranks and self.order is None:
            raise ValueError(
                f"schedule '{self.name}' needs equally many partitions on every rank (partitions: {partitions}, ranks: "
                f"{ranks}); give balance a multiple of {ranks} numbers, or cuts one name less"
            )
        if (wrong := self.rule(chunks, ranks, partitions)) is not None:
            raise ValueError(f"schedule '{self.name}' {wrong}")

    def fits(self, microbatches: int, ranks: int, partitions: int) -> bool:
        """Return whether it can run this number of micro-batches."""
        return self.rule(microbatches, ranks, partitions) is None

    def order_of(self, microbatches: int, partitions: int) -> Schedule | None:
        """Return the order that torch's runtime is given; ``None`` if torch has a class that makes its own."""
        if self.build is not None:
            return self.build(partitions, microbatches)
        if self.order is None or self.order.chunks == microbatches:
            return self.order
        return gpipe(partitions, microbatches, device_of_stage=self.order.device_of_stage)


def _anything(_chunks: int, _ranks: int, _partitions: int) -> str | None:
    return None


def _as_many_as_partitions(chunks: int, _ranks: int, partitions: int) -> str | None:
    if chunks >= partitions:
        return None
    return (
        f"needs at least as many chunks as partitions (chunks: {chunks}, partitions: {partitions}); "
        f"use chunks={partitions} or more, or schedule='gpipe'"
    )


def _full_rounds(chunks: int, ranks: int, _partitions: int) -> str | None:
    rounds = max(1, chunks // ranks)
    if chunks % rounds == 0:
        return None
    return (
        f"runs chunks in rounds of equal size (chunks: {chunks}, ranks: {ranks}, rounds: {rounds}); "
        f"use chunks={chunks // ranks * ranks} or {(chunks // ranks + 1) * ranks}"
    )


SCHEDULES = (
    RankSchedule("gpipe", "ScheduleGPipe", "one each", _anything, "gpipe"),
    RankSchedule("1f1b", "Schedule1F1B", "one each", _as_many_as_partitions, "gpipe"),
    RankSchedule("interleaved-1f1b", "ScheduleInterleaved1F1B", "loop", _full_rounds, "looped-bfs"),
    RankSchedule("looped-bfs", "ScheduleLoopedBFS", "loop", _anything, "looped-bfs"),
    RankSchedule("interleaved-zero-bubble", "ScheduleInterleavedZeroBubble", "loop", _full_rounds, "looped-bfs", True),
    RankSchedule("zbv-zero-bubble", "ScheduleZBVZeroBubble", "v", _anything, "zbv-zero-bubble", True),
    RankSchedule("dualpipev", "ScheduleDualPipeV", "v", _as_many_as_partitions, "zbv-zero-bubble", True),
    RankSchedule("v-half", "", "v", _anything, "v-half", True, v_half),
    RankSchedule("v-min", "", "v", _anything, "v-min", True, v_min),
)


def of_order(order: Schedule) -> RankSchedule:
    """Return the schedule that runs an order, such as one read from a file."""

    def rule(chunks: int, _ranks: int, _partitions: int) -> str | None:
        if chunks == order.chunks:
            return None
        return f"is an order of {order.chunks} chunks (chunks: {chunks}); use chunks={order.chunks}"

    return RankSchedule(order.name, "", "own", rule, order.name, bool(order.split.any()), order=order)


def by_name(name: str, schedules: Iterable[RankSchedule] = SCHEDULES) -> RankSchedule | None:
    """Return the schedule of that name, or of its class in torch; case, dashes and underscores do not matter."""
    for schedule in schedules:
        theirs = _plain(schedule.torch_name) or _plain(schedule.name)
        if _plain(str(name)) in (_plain(schedule.name), theirs, theirs.removeprefix("schedule")):
            return schedule
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
