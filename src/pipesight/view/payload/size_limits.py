"""How much of a run goes into a page."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a page holds of each thing. The page says what is not shown."""

    lanes: int = 256
    blocks: int = 120_000
    """Of the steps that are shown, together. The first step may have this many alone."""
    layer_runs: int = 120_000
    values: int = 120_000
    """Of statistics."""
    log_lines: int = 5_000

    def halved(self) -> Limits:
        """Return half of everything except lanes: a step is never shown in part."""
        return Limits(self.lanes, *(getattr(self, field.name) // 2 for field in fields(self)[1:]))


LIMITS = Limits()
"""The limits of a page of at most about 2 MB."""
