"""A tensor of a watched layer: what a step has to do with it, and whether it can wait to be measured with others."""

from __future__ import annotations

from typing import ClassVar

from pipesight.stats.actions import Action, TensorActions
from pipesight.stats.measurements import TensorMeasurements
from pipesight.stats.moments.cuda_moments import Calls, DeviceRow

__all__ = ["Tap", "Trial"]


class Trial:
    """A step in which a tensor is measured twice, at once and with others: is it the same by then?

    Layers that work in place change the output of the layer before, some without torch knowing.

    Attributes:
        at_once: What was measured at once.
        calls: What was measured with others.
    """

    __slots__ = ("at_once", "calls", "step")
    one_by_one: ClassVar[bool] = True

    def __init__(self, step: int) -> None:
        self.step = step
        self.at_once: list[DeviceRow] = []
        self.calls: Calls = []

    @property
    def ready(self) -> bool:
        """Whether the values of both have come."""
        rows = [*self.at_once, *(records[0] for records, _ in self.calls if records)]
        return all(row.ready for row in rows)

    @property
    def passed(self) -> bool:
        """Whether it was the same, each time."""
        after = [records[0].moments() for records, _ in self.calls if records]
        return len(after) == len(self.at_once) > 0 and all(
            row.moments().is_like(other) for row, other in zip(self.at_once, after, strict=True)
        )


class Tap:
    """A tensor of a watched layer, with what is looked up once a step.

    Attributes:
        actions: What to do with it in each step.
        action: What to do with it in that step.
        is_fast: Whether nothing remains to be looked up in this step: it waits on a GPU, or is copied elsewhere.
        quick: Whether one kernel is all that it takes on a GPU, or a copy elsewhere.
        entry: Where its calls are kept.
        powers: Whether its third and fourth moments are wanted.
        trial: Whether it can wait to be measured with others, while that is found out.
        waits: Whether it can.
        step: The step that was looked up.
        entries: Those of its iteration.
    """

    __slots__ = (
        "action",
        "actions",
        "entries",
        "entry",
        "is_fast",
        "layer",
        "powers",
        "quick",
        "step",
        "tensor",
        "trial",
        "waits",
    )

    def __init__(self, layer: str, tensor: str) -> None:
        self.layer, self.tensor = layer, tensor
        self.actions: TensorActions | None = None
        self.action: Action | None = None
        self.entry: TensorMeasurements | None = None
        self.quick = self.powers = self.is_fast = False
        self.trial: Trial | None = None
        self.waits: bool | None = None
        self.step = -1
        self.entries: object = None
