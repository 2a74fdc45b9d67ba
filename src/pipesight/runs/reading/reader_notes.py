"""What a reader tells about its input: notes on files, and the error that there is no run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["NotARunError", "Note"]


class NotARunError(ValueError):
    """There is nothing to report: no file that can be read, or no event in any."""


@dataclass(frozen=True, slots=True)
class Note:
    """A warning about a file of a run, for the reader of its report."""

    path: Path
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"
