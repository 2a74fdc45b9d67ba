"""How a model is run, but for its balance: schedule, partitions, chunks and checkpoint mode."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipesight.schedule.argument_checks import SCHEDULES
from pipesight.schedule.supported_schedules import BY_NAME
from pipesight.schedule.task_orders import Schedule, recomputed, recomputing

__all__ = ["LOOPS", "Setting"]

LOOPS = ("interleaved", "looped-bfs", "zero-bubble")
"""The schedules whose devices have any number of stages each."""


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
    """Stages per partition, in an interleaved schedule; 2 in those whose stages lie in a V."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)} (schedule: {self.schedule!r})")
        if self.in_v and self.rounds == 1:
            object.__setattr__(self, "rounds", 2)
        if self.rounds != (2 if self.in_v else 1) and self.schedule not in LOOPS:
            rule = "has two rounds" if self.in_v else "has one round; only interleaved ones have several"
            raise ValueError(f"this schedule {rule} (schedule: {self.schedule}, rounds: {self.rounds})")

    @property
    def stages(self) -> int:
        """The number of stages: one per partition and round."""
        return self.partitions * self.rounds

    @property
    def engine_name(self) -> str:
        """The name of the schedule in both engines."""
        if self.schedule == "interleaved":
            return "interleaved-1f1b"
        return "interleaved-zero-bubble" if self.schedule == "zero-bubble" and self.rounds > 1 else self.schedule

    @property
    def torch_name(self) -> str:
        """Torch's class for it; empty if there is none, or if that needs other numbers of micro-batches."""
        if self.schedule == "1f1b" and self.chunks < self.stages:
            return ""
        if self.schedule == "zero-bubble" and self.chunks % max(1, self.chunks // self.partitions):
            return ""
        return BY_NAME[self.engine_name].torch_name

    @property
    def in_v(self) -> bool:
        """Whether the first device has the last stage, too."""
        return BY_NAME[self.engine_name].placement == "v"

    @property
    def runs(self) -> bool:
        """Whether an engine can run it."""
        if self.partitions == 1 and (self.rounds > 1 or self.schedule in ("interleaved", "looped-bfs")):
            return False
        return BY_NAME[self.engine_name].fits(self.chunks, self.partitions, self.stages)

    def build(self, *, joined: bool = True) -> Schedule:
        """Return the schedule; ``joined`` says whether GPipe waits for the loss of the whole batch."""
        named = BY_NAME[self.engine_name].build(self.stages, self.chunks, self.partitions)
        found = recomputing(named, recomputed(self.checkpoint, self.chunks))
        return replace(found, name=self.schedule, joined=joined and self.schedule == "gpipe")
