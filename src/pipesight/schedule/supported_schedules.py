"""The schedules that have a name: what they require, and which rank, or worker, has which partition.

With 2 ranks and 4 partitions, the ranks have the partitions

- one each: gpipe, 1f1b, zero-bubble           0 | 1      (2 partitions)
- in a loop: interleaved, looped BFS           0 2 | 1 3
- in a V: ZBV, DualPipeV, V-Half, V-Min        0 3 | 1 2
- as an order of your own has them
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipesight.schedule.csv_format import schedule_to_csv
from pipesight.schedule.task_orders import Schedule, gpipe, interleaved, looped_bfs, one_f_one_b, zero_bubble
from pipesight.schedule.v_memory_orders import v_half, v_min
from pipesight.schedule.v_orders import dualpipev, zbv

__all__ = ["BY_NAME", "SCHEDULES", "RankSchedule", "by_name", "of_order"]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """One schedule: what it requires, and what makes the order of its tasks."""

    name: str
    placement: Literal["one each", "loop", "v", "own"]
    build: Callable[[int, int, int], Schedule]
    """Makes the order, given partitions, micro-batches and ranks."""
    rule: Callable[[int, int, int], str | None] = lambda chunks, ranks, partitions: None
    """Given micro-batches, ranks and partitions, returns what is wrong and how to fix it, or ``None``."""
    torch_name: str = ""
    """The class of torch.distributed.pipelining that makes this order; empty if there is none."""
    stand_in: str = ""
    """The schedule for batches that are too small for this one. It gives the same gradients."""
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

    def order_of(self, microbatches: int, ranks: int, partitions: int) -> Schedule:
        """Return the order for so many micro-batches: of fewer than it needs, that of its stand-in."""
        if self.order is None and not self.fits(microbatches, ranks, partitions):
            return BY_NAME[self.stand_in].build(partitions, microbatches, ranks)
        return self.build(partitions, microbatches, ranks)


def _as_many_as_partitions(chunks: int, _ranks: int, partitions: int) -> str | None:
    if chunks >= partitions:
        return None
    return (
        f"needs at least as many chunks as partitions (chunks: {chunks}, partitions: {partitions}); "
        f"use chunks={partitions} or more, or schedule='gpipe'"
    )


def _full_rounds(chunks: int, ranks: int, partitions: int) -> str | None:
    rounds = max(1, chunks // ranks)
    if chunks % rounds == 0 or partitions == ranks:
        return None
    return (
        f"runs chunks in rounds of equal size (chunks: {chunks}, ranks: {ranks}, rounds: {rounds}); "
        f"use chunks={chunks // ranks * ranks} or {(chunks // ranks + 1) * ranks}"
    )


SCHEDULES = (
    RankSchedule("gpipe", "one each", lambda n, m, _: gpipe(n, m), torch_name="ScheduleGPipe"),
    RankSchedule("1f1b", "one each", lambda n, m, _: one_f_one_b(n, m), torch_name="Schedule1F1B"),
    RankSchedule(
        "interleaved-1f1b",
        "loop",
        lambda n, m, ranks: interleaved(n, m, devices=ranks),
        _full_rounds,
        "ScheduleInterleaved1F1B",
        "looped-bfs",
    ),
    RankSchedule(
        "looped-bfs", "loop", lambda n, m, ranks: looped_bfs(n, m, devices=ranks), torch_name="ScheduleLoopedBFS"
    ),
    RankSchedule(
        "interleaved-zero-bubble",
        "loop",
        lambda n, m, ranks: zero_bubble(n, m, devices=ranks),
        _full_rounds,
        "ScheduleInterleavedZeroBubble",
        "looped-bfs",
    ),
    RankSchedule(
        "zero-bubble", "one each", lambda n, m, _: zero_bubble(n, m), torch_name="ScheduleInterleavedZeroBubble"
    ),
    RankSchedule("zbv-zero-bubble", "v", lambda n, m, _: zbv(n, m), torch_name="ScheduleZBVZeroBubble"),
    RankSchedule(
        "dualpipev",
        "v",
        lambda n, m, _: dualpipev(n, m),
        _as_many_as_partitions,
        "ScheduleDualPipeV",
        "zbv-zero-bubble",
    ),
    RankSchedule("v-half", "v", lambda n, m, _: v_half(n, m)),
    RankSchedule("v-min", "v", lambda n, m, _: v_min(n, m)),
)
BY_NAME = {schedule.name: schedule for schedule in SCHEDULES}


def of_order(order: Schedule) -> RankSchedule:
    """Return the schedule that runs an order, such as one read from a file."""

    def build(partitions: int, microbatches: int, _ranks: int) -> Schedule:
        if microbatches == order.chunks:
            return order
        return one_f_one_b(partitions, microbatches, device_of_stage=order.device_of_stage)

    def rule(chunks: int, _ranks: int, _partitions: int) -> str | None:
        if chunks == order.chunks:
            return None
        return f"is an order of {order.chunks} chunks (chunks: {chunks}); use chunks={order.chunks}"

    return RankSchedule(order.name, "own", build, rule, order=order)


def by_name(name: str) -> RankSchedule | None:
    """Return the schedule of that name, or of its class in torch; case, dashes and underscores do not matter."""
    for schedule in SCHEDULES:
        theirs = _plain(schedule.torch_name) or _plain(schedule.name)
        if _plain(str(name)) in (_plain(schedule.name), theirs, theirs.removeprefix("schedule")):
            return schedule
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
