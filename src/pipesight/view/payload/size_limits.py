"""How much of a run goes into a page."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of everything that a page holds. The page says what it leaves out."""

    lanes: int = 256
    blocks: int = 120_000
    """Of the steps that are shown, together. The first step may have this many alone."""
    layer_runs: int = 120_000
    values: int = 120_000
    """Of statistics."""
    log_lines: int = 5_000

    def halved(self) -> Limits:
        """Return half of everything, but for the lanes: a step is not shown in part."""
        return Limits(self.lanes, *(getattr(self, field.name) // 2 for field in fields(self)[1:]))


LIMITS = Limits()
"""Of a page of about 2 MB at most."""
