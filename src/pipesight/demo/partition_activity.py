"""An observer of what each partition is doing right now, and how long it has been busy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from pipesight import context
from pipesight.context import Observer, Phase, Where

__all__ = ["Activity", "ActivityMonitor"]


@dataclass(frozen=True, slots=True)
class Activity:
    """What a partition is doing. On a GPU: what it is launching; the GPU itself may lag behind."""

    phase: Phase
    microbatch: int
    layer: str | None
    """``None`` until the first layer starts."""


class ActivityMonitor(Observer):
    """Keeps one row per partition up to date; ``None`` is idle.

    Example::

        with ActivityMonitor(partitions=4) as watch:
            ...  # train
            print(watch.rows[0])
        print(watch.seconds)
    """

    def __init__(self, partitions: int) -> None:
        # A worker replaces its own row atomically, so readers need no lock.
        self.rows: list[Activity | None] = [None] * partitions
        self.seconds = [0.0] * partitions
        """How long each partition was busy."""
        self._begins = [0.0] * partitions

    def __enter__(self) -> Self:
        context.attach(self)
        return self

    def __exit__(self, *_: object) -> None:
        context.detach(self)

    def task_started(self, where: Where) -> None:
        """Note the task."""
        self._begins[where.partition] = time.perf_counter()
        self._note(where)

    def layer_started(self, where: Where) -> None:
        """Note the layer."""
        self._note(where)

    def task_ended(self, where: Where) -> None:
        """Note that the partition is idle."""
        self.seconds[where.partition] += time.perf_counter() - self._begins[where.partition]
        self.rows[where.partition] = None

    def _note(self, where: Where) -> None:
        if where.phase is not None:
            self.rows[where.partition] = Activity(where.phase, where.microbatch, where.layer)
