"""Leaving on SIGTERM, which comes before a preemption: all ranks together, at the next step, after a checkpoint."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipesight._logger import own_logger

__all__ = ["Farewell"]

logger = own_logger(__name__)


class Farewell:
    """Notes the signal; the ranks tell each other before each step, so it is enough that one of them gets it."""

    def __init__(self) -> None:
        self.asked = False
        """Whether this rank has got the signal."""
        self._save: Callable[[], Path] | None = None

    def on_sigterm(self, save: Callable[[], Path]) -> None:
        """From now on, note the signal; ``save`` writes the checkpoint, and returns where it is."""
        self._save = save
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: Any) -> None:
        self.asked = True

    def leave(self) -> None:
        """Save, and end the process with exit code 143; do nothing if nobody said how to save."""
        if self._save is None:
            return
        path = self._save()
        logger.warning("saved %s and left, as SIGTERM asked", path)
        sys.exit(128 + signal.SIGTERM)
