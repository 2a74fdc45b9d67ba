"""How a model is run, but for its balance: schedule, partitions, chunks and checkpoint mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipesight.schedule.argument_checks import SCHEDULES
from pipesight.schedule.task_orders import (
    Schedule,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    recomputed,
    zero_bubble,
)
from pipesight.schedule.v_memory_orders import v_half, v_min
from pipesight.schedule.v_orders import dualpipev, zbv

__all__ = ["LOOPS", "Setting"]

_IN_LOOPS: dict[str, Callable[..., Schedule]] = {
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zero-bubble": zero_bubble,
}
_IN_VS: dict[str, Callable[..., Schedule]] = {
    "zbv-zero-bubble": zbv,
    "dualpipev": dualpipev,
    "v-half": v_half,
    "v-min": v_min,
}

LOOPS = (*_IN_LOOPS,)
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
        if self.schedule in _IN_VS and self.rounds == 1:
            object.__setattr__(self, "rounds", 2)
        if self.rounds != (2 if self.schedule in _IN_VS else 1) and self.schedule not in _IN_LOOPS:
            rule = "has two rounds" if self.schedule in _IN_VS else "has one round; only interleaved ones have several"
            raise ValueError(f"this schedule {rule} (schedule: {self.schedule}, rounds: {self.rounds})")

    @property
    def stages(self) -> int:
        """The number of stages: one per partition and round."""
        return self.partitions * self.rounds

    @property
    def in_v(self) -> bool:
        """Whether the first device has the last stage, too."""
        return self.schedule in _IN_VS

    @property
    def runs(self) -> bool:
        """Whether an engine can run it: `pipesight.GPipe`, or `DistributedPipeline` if torch has the schedule."""
        several = self.partitions > 1
        if self.schedule in ("1f1b", "dualpipev"):
            return self.chunks >= self.stages and (several or not self.in_v)
        if self.schedule in ("gpipe", "looped-bfs") or self.in_v:
            return several or self.schedule == "gpipe"
        even = self.chunks % max(1, self.chunks // self.partitions) == 0
        return even and (several or self.schedule == "zero-bubble")

    def build(self) -> Schedule:
        """Return the schedule."""
        again = recomputed(self.checkpoint, self.chunks)
        if self.schedule == "gpipe":
            return gpipe(self.stages, self.chunks, recompute=again, joined=True)
        if self.schedule == "1f1b":
            return one_f_one_b(self.stages, self.chunks, recompute=again)
        if self.in_v:
            return _IN_VS[self.schedule](self.stages, self.chunks, recompute=again)
        return _IN_LOOPS[self.schedule](self.stages, self.chunks, devices=self.partitions, recompute=again)
