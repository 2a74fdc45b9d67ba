"""Which steps are logged: ``freq``, ``start_step``, ``end_step`` and ``start_end_list``."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

from pipesight.stats.config_errors import shown

__all__ = ["STEP_KEYS", "Steps", "is_integer", "step_mistakes", "steps_of"]

STEP_KEYS = frozenset({"freq", "start_step", "end_step", "start_end_list"})


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps to log: the multiples of ``freq`` in a range, or in any of several.

    Multiples count from step 0, wherever a range starts. ::

        >>> steps = Steps(freq=10, start_step=5, end_step=30)
        >>> [step for step in range(100) if steps.includes(step)]
        [10, 20, 30]

    Args:
        freq: Log each step that it divides.
        start_step: The first step of the range.
        end_step: The last step of the range; -1 for no end.
        start_end_list: Several ranges ``(start, end)`` in place of one; an end of -1 for no end.
        inclusive: Whether an end in ``start_end_list`` is in its range. It is not, except in Transformer Engine's
            features.

    Raises:
        ValueError: They make no sense together.
    """

    freq: int = 1
    start_step: int = 0
    end_step: int = -1
    start_end_list: tuple[tuple[int, int], ...] | None = None
    inclusive: bool = False
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _stops: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _first: float = field(init=False, repr=False, compare=False)
    _stop: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"freq": self.freq, "start_step": self.start_step, "end_step": self.end_step}
        if self.start_end_list is not None:
            given = {"freq": self.freq, "start_end_list": self.start_end_list}
        for key, text in step_mistakes(given, inclusive=self.inclusive):
            raise ValueError(f"{key}: {text}")
        if self.start_end_list is None:
            ranges: list[tuple[int, float]] = [(self.start_step, _stop(self.end_step, inclusive=True))]
        else:
            ordered = tuple(sorted((start, end) for start, end in self.start_end_list))
            object.__setattr__(self, "start_end_list", ordered)
            ranges = [(start, _stop(end, inclusive=self.inclusive)) for start, end in ordered]
        object.__setattr__(self, "_starts", tuple(start for start, _ in ranges))
        object.__setattr__(self, "_stops", tuple(stop for _, stop in ranges))
        object.__setattr__(self, "_first", ranges[0][0])
        object.__setattr__(self, "_stop", ranges[-1][1])

    @staticmethod
    def from_settings(settings: Mapping[str, Any], *, inclusive: bool = False) -> Steps:
        """Take the steps from the settings of a feature; ``ValueError`` if they make no sense, see `step_mistakes`."""
        for key, text in step_mistakes(settings, inclusive=inclusive):
            raise ValueError(f"{key}: {text}")
        ranges = settings.get("start_end_list")
        return Steps(
            freq=settings.get("freq", 1),
            start_step=settings.get("start_step", 0),
            end_step=settings.get("end_step", -1),
            start_end_list=None if ranges is None else tuple((start, end) for start, end in ranges),
            inclusive=inclusive,
        )

    def includes(self, step: int) -> bool:
        """Say whether to log ``step``."""
        if step % self.freq or not self._first <= step < self._stop:
            return False
        return len(self._starts) == 1 or step < self._stops[bisect_right(self._starts, step) - 1]

    def __str__(self) -> str:
        ranges = ", ".join(
            f"{start} on" if stop == math.inf else f"{start}" if stop == start + 1 else f"{start} to {stop - 1}"
            for start, stop in zip(self._starts, self._stops, strict=True)
        )
        every = "every step" if self.freq == 1 else f"every {self.freq} steps"
        return every if ranges == "0 on" else f"{every}, {ranges}"


def steps_of(settings: Mapping[str, Any], *, inclusive: bool = False) -> Steps:
    """Return the steps of settings that a feature was called with, where ``None`` stands for the default.

    Raises:
        ValueError: They make no sense.
    """
    given = {key: settings[key] for key in STEP_KEYS if settings.get(key) is not None}
    return Steps.from_settings(given, inclusive=inclusive)


def step_mistakes(settings: Mapping[str, Any], *, inclusive: bool = False) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the steps in ``settings``: the key, and the rule it breaks."""
    freq, start, end = settings.get("freq", 1), settings.get("start_step", 0), settings.get("end_step", -1)
    if not is_integer(freq) or freq < 1:
        yield "freq", f"must be an integer of 1 or more (freq: {shown(freq)})"
    if not is_integer(start) or start < 0:
        yield "start_step", f"must be an integer of 0 or more (start_step: {shown(start)})"
    if not is_integer(end) or end < -1:
        yield "end_step", f"must be an integer of 0 or more, or -1 for no end (end_step: {shown(end)})"
    elif is_integer(start) and -1 < end < start:
        yield "end_step", f"must not be before start_step (start_step: {start}, end_step: {end})"
    ranges = settings.get("start_end_list")
    if ranges is None:
        return
    for key in ("start_step", "end_step"):
        if key in settings:
            yield "start_end_list", f"cannot be combined with {key} ({key}: {shown(settings[key])}); remove one of them"
    yield from (("start_end_list", text) for text in _range_mistakes(ranges, inclusive=inclusive))


def _range_mistakes(ranges: Any, *, inclusive: bool) -> Iterator[str]:
    if not _is_list(ranges) or not ranges:
        yield f"must be a list of [start, end] pairs (start_end_list: {shown(ranges)}), such as [[0, 100], [500, -1]]"
        return
    good = []
    for pair in ranges:
        if not _is_list(pair) or len(pair) != 2 or not all(map(is_integer, pair)):
            yield f"must hold pairs of integers [start, end] (found: {shown(pair)})"
        elif pair[0] < 0 or pair[1] < -1:
            yield f"must hold steps of 0 or more, or -1 for no end (found: {shown(list(pair))})"
        elif not pair[0] < _stop(pair[1], inclusive=inclusive):
            rule = "not be before its start" if inclusive else "be after its start, as it is exclusive"
            yield f"the end of a range must {rule} (found: {shown(list(pair))})"
        else:
            good.append((pair[0], pair[1]))
    good.sort()
    for earlier, later in pairwise(good):
        if later[0] < _stop(earlier[1], inclusive=inclusive):
            yield f"ranges must not overlap (found: {list(earlier)} and {list(later)})"


def _stop(end: int, *, inclusive: bool) -> float:
    return math.inf if end == -1 else end + 1 if inclusive else end


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number, of a size that anything is counted in."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
