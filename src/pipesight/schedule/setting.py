"""How a model is run, but for its balance: schedule, partitions, chunks and checkpoint mode."""

from __future__ import annotations

from dataclasses import dataclass

from pipesight.schedule.argument_checks import SCHEDULES
from pipesight.schedule.task_orders import Schedule, gpipe, interleaved, one_f_one_b, recomputed, zero_bubble

__all__ = ["Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is run, except for its balance.

    Raises:
        ValueError: The schedule is unknown, or has no rounds.
    """

    schedule: str
    """One of `SCHEDULES`."""
    partitions: int
    """How many devices, or ranks, the model is cut over."""
    chunks: int
    """Micro-batches per mini-batch."""
    checkpoint: str = "except_last"
    """Which micro-batches are recomputed: `always`, `except_last` or `never`."""
    rounds: int = 1
    """Stages per partition, in an interleaved schedule."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)} (schedule: {self.schedule!r})")
        if self.rounds != 1 and self.schedule != "interleaved":
            raise ValueError(
                f"only an interleaved schedule has several rounds (schedule: {self.schedule}, rounds: {self.rounds})"
            )

    @property
    def stages(self) -> int:
        """The number of stages: one per partition and round."""
        return self.partitions * self.rounds

    @property
    def runs(self) -> bool:
        """Whether an engine can run it: `pipesight.GPipe`, or `DistributedPipeline` if torch has the schedule."""
        if self.schedule == "1f1b":
            return self.chunks >= self.partitions
        if self.schedule == "interleaved":
            return self.partitions > 1 and self.chunks % self.partitions == 0  # other numbers are not simulated
        return self.schedule == "gpipe" or self.chunks % max(1, self.chunks // self.partitions) == 0

    def build(self) -> Schedule:
        """Return the schedule."""
        again = recomputed(self.checkpoint, self.chunks)
        if self.schedule == "gpipe":
            return gpipe(self.stages, self.chunks, recompute=again, joined=True)
        if self.schedule == "1f1b":
            return one_f_one_b(self.stages, self.chunks, recompute=again)
        if self.schedule == "zero-bubble":
            return zero_bubble(self.stages, self.chunks, recompute=again)
        return interleaved(self.stages, self.chunks, devices=self.partitions, recompute=again)
