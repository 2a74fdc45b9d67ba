"""Which steps of a run are recorded: windows, and each Nth step in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["StepRanges", "StepSampling"]

Window: TypeAlias = tuple[int, int | None]
"""The first step and the last, both included; ``None`` for no end."""

StepRanges: TypeAlias = tuple[int, int | None] | range | Iterable[tuple[int, int | None] | range] | None
"""One window, several, or ``None`` for all steps."""

_FIX = "give the first and the last one: steps=(10, 20), or several such pairs: steps=[(10, 20), (100, 110)]"


@dataclass(frozen=True, slots=True)
class StepSampling:
    """Tells which steps are recorded.

    Example::

        StepSampling.of((10, 20), every=5).include(15)  # and 10, and 20
    """

    windows: tuple[Window, ...] | None = None
    every: int = 1

    @classmethod
    def of(cls, steps: StepRanges, *, every: int = 1) -> StepSampling:
        """Check what a user says.

        Raises:
            ValueError: There are no such steps.
        """
        if not _is_count(every) or every < 1:
            raise ValueError(f"every must be an integer of 1 or more (every: {every!r})")
        if steps is None:
            return cls(None, every)
        given: Sequence[Any]
        if isinstance(steps, range) or _is_window(steps):
            given = [steps]
        elif isinstance(steps, Iterable) and not isinstance(steps, str | bytes):
            given = list(steps)
        else:
            given = []
        if not given:
            raise ValueError(f"steps must name some steps (steps: {steps!r}); {_FIX}")
        return cls(tuple(sorted((_window(one) for one in given), key=lambda window: window[0])), every)

    @classmethod
    def parse(cls, text: str | None, *, every: int = 1) -> StepSampling:
        """Read what a command line says: ``10:20``, ``10:``, ``:20``, ``15``, or several with commas between.

        Raises:
            ValueError: It says something else.
        """
        if text is None:
            return cls.of(None, every=every)
        windows: list[Window] = []
        for piece in text.split(","):
            first, colon, last = (part.strip() for part in piece.partition(":"))
            if not all(part.isdecimal() or (colon and not part) for part in (first, last or first)):
                raise ValueError(f"steps must look like 10:20, 10:, :20, 15 or 0:2,100:102 (steps: {text!r})")
            windows.append((int(first or 0), int(last) if last else None if colon else int(first)))
        return cls.of(windows, every=every)

    def include(self, step: int) -> bool:
        """Return whether a step is recorded."""
        if self.windows is None:
            return step % self.every == 0
        return any(
            first <= step and (last is None or step <= last) and (step - first) % self.every == 0
            for first, last in self.windows
        )

    def as_json(self) -> Any:
        """Return what ``run.json`` says: ``None``, a pair, or a list of pairs."""
        if self.windows is None:
            return None
        pairs = [list(window) for window in self.windows]
        return pairs[0] if len(pairs) == 1 else pairs


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_window(value: Any) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(isinstance(end, int) or end is None for end in value)


def _window(given: Any) -> Window:
    if isinstance(given, range):
        if given.step != 1 or not given:
            raise ValueError(f"a range of steps must go up one by one (steps: {given}); every=N takes each Nth")
        given = (given.start, given.stop - 1)
    if not _is_window(given) or not _is_count(given[0]) or not (given[1] is None or _is_count(given[1])):
        raise ValueError(f"a window of steps must have two numbers from 0 on (steps: {given!r}); {_FIX}")
    first, last = given
    if last is not None and last < first:
        raise ValueError(f"the last step of a window must not be before the first (steps: {given!r})")
    return int(first), last
