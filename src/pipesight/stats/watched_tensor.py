"""A tensor of a watched layer: what a step has to do with it, and whether it can wait to be measured with others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import ClassVar, TypeAlias

from torch import Tensor

from pipesight.context import Where
from pipesight.stats.actions import Action, TensorActions
from pipesight.stats.measurements import TensorMeasurements
from pipesight.stats.moments.cuda_readback import Calls, DeviceRow

__all__ = ["Series", "Take", "Tap", "Trial"]

_codes = itertools.count()


class Series:
    """A tensor of a watched layer with what is done with it, the same step after step.

    Attributes:
        calls: What was measured of it alone in the step under way, as `TensorMeasurements.calls`. Most calls are
            measured together with those of others, and stay with those.
        code: Its number among all series.
        powers: Whether its third and fourth moments are wanted.
    """

    __slots__ = ("action", "calls", "code", "layer", "powers", "tensor")
    one_by_one: ClassVar[bool] = False

    def __init__(self, layer: str, tensor: str, action: Action) -> None:
        self.layer, self.tensor, self.action = layer, tensor, action
        self.powers = action.sources[0].powers
        self.calls: Calls = []
        self.code = next(_codes)


Take: TypeAlias = Callable[[Tensor, Series, Where | None], bool]
"""Has a tensor measured with others, or returns False."""


class Trial:
    """A step in which a tensor is measured twice, at once and with others: is it the same by then?

    Layers that work in place change the output of the layer before, some without torch knowing.

    Attributes:
        at_once: What was measured at once.
        calls: What was measured with others.
    """

    __slots__ = ("at_once", "calls", "code", "powers", "step")
    one_by_one: ClassVar[bool] = True

    def __init__(self, step: int, powers: bool) -> None:
        self.step, self.powers, self.code = step, powers, next(_codes)
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
        take: Takes it in this step, if nothing remains to be looked up: it waits on a GPU, or is copied elsewhere.
        series: What `take` is told that it is.
        quick: Whether one kernel is all that it takes on a GPU, or a copy elsewhere.
        entry: Where its calls are kept, without `take`.
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
        "layer",
        "powers",
        "quick",
        "series",
        "step",
        "take",
        "tensor",
        "trial",
        "waits",
    )

    def __init__(self, layer: str, tensor: str) -> None:
        self.layer, self.tensor = layer, tensor
        self.actions: TensorActions | None = None
        self.action: Action | None = None
        self.take: Take | None = None
        self.series: Series | None = None
        self.entry: TensorMeasurements | None = None
        self.quick = self.powers = False
        self.trial: Trial | None = None
        self.waits: bool | None = None
        self.step = -1
        self.entries: object = None
