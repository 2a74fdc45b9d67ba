"""Log each micro-batch in each partition."""

from __future__ import annotations

import logging

from pipesight.context import Observer, Where
from pipesight.logs.context_filter import attributes, lines

__all__ = ["TaskLog"]

MESSAGE = "Micro-batch %d (partition %d): checkpoint_stop=%d, using_checkpointing=%s"


class TaskLog(Observer):
    """Logs each forward task at INFO, if the logger ``pipesight.pipeline`` has that level when a pass starts.

    It is attached to every process (`context.observer.DEFAULT_OBSERVERS`).
    """

    def wanted(self) -> bool:
        """Return whether the logger is enabled for INFO."""
        return lines.isEnabledFor(logging.INFO)

    def task_started(self, where: Where) -> None:
        """Log the start of a forward task."""
        if where.phase == "forward":
            lines.info(
                MESSAGE,
                where.microbatch,
                where.partition,
                where.checkpoint_stop,
                where.checkpointing,
                extra=attributes(where),
            )
