"""Which steps of a run are recorded: ranges of steps, and every Nth step in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["StepRanges", "StepSampling"]

StepRange: TypeAlias = tuple[int, int | None]
"""The first step and the last, both included; ``None`` for no end."""

StepRanges: TypeAlias = tuple[int, int | None] | range | Iterable[tuple[int, int | None] | range] | None
"""One range, several, or ``None`` for all steps."""

_FIX = "give the first and the last one: steps=(10, 20), or several such pairs: steps=[(10, 20), (100, 110)]"


@dataclass(frozen=True, slots=True)
class StepSampling:
    """Ranges of steps, and every Nth step in them.

    Example::

        StepSampling.of((10, 20), every=5).include(15)  # and 10, and 20
    """

    ranges: tuple[StepRange, ...] | None = None
    every: int = 1

    @classmethod
    def of(cls, steps: StepRanges, *, every: int = 1) -> StepSampling:
        """Check the arguments of `observe`.

        Raises:
            ValueError: There are no such steps.
        """
        if not _is_count(every) or every < 1:
            raise ValueError(f"every must be an integer of 1 or more (every: {every!r})")
        if steps is None:
            return cls(None, every)
        given: Sequence[Any]
        if isinstance(steps, range) or _is_range(steps):
            given = [steps]
        elif isinstance(steps, Iterable) and not isinstance(steps, str | bytes):
            given = list(steps)
        else:
            given = []
        if not given:
            raise ValueError(f"steps must contain at least one range (steps: {steps!r}); {_FIX}")
        return cls(tuple(sorted((_range(one) for one in given), key=lambda range_: range_[0])), every)

    @classmethod
    def parse(cls, text: str | None, *, every: int = 1) -> StepSampling:
        """Parse ``10:20``, ``10:``, ``:20``, ``15``, or several, separated by commas.

        Raises:
            ValueError: It is none of these.
        """
        if text is None:
            return cls.of(None, every=every)
        ranges: list[StepRange] = []
        for piece in text.split(","):
            first, colon, last = (part.strip() for part in piece.partition(":"))
            if not all(part.isdecimal() or (colon and not part) for part in (first, last or first)):
                raise ValueError(f"steps must look like 10:20, 10:, :20, 15 or 0:2,100:102 (steps: {text!r})")
            ranges.append((int(first or 0), int(last) if last else None if colon else int(first)))
        return cls.of(ranges, every=every)

    def include(self, step: int) -> bool:
        """Return whether a step is recorded."""
        if self.ranges is None:
            return step % self.every == 0
        return any(
            first <= step and (last is None or step <= last) and (step - first) % self.every == 0
            for first, last in self.ranges
        )

    def as_json(self) -> Any:
        """Return what ``run.json`` says: ``None``, a pair, or a list of pairs."""
        if self.ranges is None:
            return None
        pairs = [list(range_) for range_ in self.ranges]
        return pairs[0] if len(pairs) == 1 else pairs


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_range(value: Any) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(isinstance(end, int) or end is None for end in value)


def _range(given: Any) -> StepRange:
    if isinstance(given, range):
        if given.step != 1 or not given:
            raise ValueError(f"a range of steps must have a step of 1 (steps: {given}); every=N records every Nth")
        given = (given.start, given.stop - 1)
    if not _is_range(given) or not _is_count(given[0]) or not (given[1] is None or _is_count(given[1])):
        raise ValueError(f"a range of steps must be two integers of 0 or more (steps: {given!r}); {_FIX}")
    first, last = given
    if last is not None and last < first:
        raise ValueError(f"the last step of a range must not be before the first (steps: {given!r})")
    return int(first), last
