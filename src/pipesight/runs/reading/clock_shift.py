"""What to add to the times of a rank to get those of rank 0's clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

__all__ = ["NO_SHIFT", "ClockShift"]

_TIME = re.compile(rb'"ts":(\d+)')


@dataclass(frozen=True, slots=True)
class ClockShift:
    """Microseconds to add: ``offset``, plus ``drift`` for each microsecond after ``since``."""

    offset: int = 0
    drift: float = 0.0
    since: int = 0

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self | None:
        """Return the shift in the description of a rank; ``None`` if there is none."""
        clock = facts.get("clock")
        if not isinstance(clock, dict) or not isinstance(offset := clock.get("offset_correction_ns"), int):
            return None
        drift, since = clock.get("drift"), clock.get("drift_since_ns")
        if not isinstance(drift, float | int) or not abs(drift) < 1 or not isinstance(since, int):
            return cls(offset // 1000)
        return cls(offset // 1000, float(drift), since // 1000)

    def apply(self, moment: int) -> int:
        """Return a time by the clock of rank 0."""
        return moment + self.offset + round((moment - self.since) * self.drift)

    def apply_to(self, line: bytes) -> bytes:
        """Return the line of an event with its time by the clock of rank 0."""
        return _TIME.sub(lambda found: b'"ts":%d' % self.apply(int(found[1])), line, count=1)

    def later(self, microseconds: int) -> Self:
        """Return the same, with more to add."""
        return replace(self, offset=self.offset + microseconds)


NO_SHIFT = ClockShift()
