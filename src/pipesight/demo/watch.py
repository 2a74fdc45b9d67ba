"""See what each partition is doing right now: an observer that keeps one row for each."""

from __future__ import annotations

from dataclasses import dataclass

from pipesight.context import Observer, Phase, Where

__all__ = ["Activity", "Watch"]


@dataclass(frozen=True, slots=True)
class Activity:
    """What a partition is at. On a GPU: what it is handing to the GPU, which may lag behind."""

    phase: Phase
    microbatch: int
    layer: str | None
    """``None`` until the first layer starts."""


class Watch(Observer):
    """Keeps the row of each partition up to date; ``None`` is an idle one.

    Example::

        watch = Watch(partitions=4)
        context.attach(watch)
        ...  # train
        print(watch.rows[0])
    """

    def __init__(self, partitions: int) -> None:
        # A worker replaces its own row at one stroke, so readers need no lock.
        self.rows: list[Activity | None] = [None] * partitions

    def task_started(self, where: Where) -> None:
        """Note the task."""
        self._note(where)

    def layer_started(self, where: Where) -> None:
        """Note the layer."""
        self._note(where)

    def task_ended(self, where: Where) -> None:
        """Note that the partition waits."""
        self.rows[where.partition] = None

    def _note(self, where: Where) -> None:
        if where.phase is not None:
            self.rows[where.partition] = Activity(where.phase, where.microbatch, where.layer)
