"""What `observe` shows in a notebook while it records: one line that is kept up to date."""

from __future__ import annotations

import html
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from pipesight._formatting import time as written
from pipesight._plurals import count_of

__all__ = ["NotebookLine", "in_notebook"]

LEAST = 0.5  # seconds from one update to the next


class NotebookLine:
    """A line in the output of a cell: how many steps were recorded, and how long they take."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps = 0
        self._shown_at = self._turned_at = time.monotonic()
        self._display = _displayed(self._content("no step yet"))

    def turn(self, step: int) -> None:
        """A step has ended."""
        now = time.monotonic()
        took, self._turned_at = now - self._turned_at, now
        self._steps += 1
        if now - self._shown_at >= LEAST:
            self._shown_at = now
            self._update(f"step {step} took {written(took * 1e6)}")

    def end(self, outcome: str, *, whole: bool) -> None:
        """The recording has ended; ``whole`` tells whether the last step has, too."""
        self._update(f"{outcome}, {count_of(self._steps + whole, 'step')}; pipesight report {self._path}")

    def _update(self, words: str) -> None:
        self._display.update(self._content(words), raw=True)

    def _content(self, words: str) -> dict[str, str]:
        text = f"recording into {self._path}: {words}"
        return {"text/plain": text, "text/html": f"<code>{html.escape(text)}</code>"}


def in_notebook() -> bool:
    """Return whether the program is a cell of a notebook, whose outputs can change."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def _displayed(content: dict[str, str]) -> Any:
    return import_module("IPython.display").display(content, raw=True, display_id=True)
