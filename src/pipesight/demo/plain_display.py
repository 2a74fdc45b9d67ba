"""Show a training as lines of text, for files, pipes and simple terminals."""

from __future__ import annotations

from typing import Self

from pipesight.demo.progress import Progress

__all__ = ["PlainDisplay"]

LINES = 20
"""About how many lines a whole training gets."""


class PlainDisplay:
    """Prints a line for the first step, one for each twentieth of the training, and an empty one at the end."""

    def __init__(self) -> None:
        self._printed = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        print()

    def show(self, progress: Progress) -> None:
        """Print a line, unless the last one is recent."""
        reached = int(progress.share * LINES)
        if reached == self._printed:
            return
        self._printed = reached
        print(f"{progress.count}  loss {progress.loss:.3f}  {progress.samples_per_second:4.0f} samples/s", flush=True)
