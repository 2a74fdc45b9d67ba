"""A line for every micro-batch in every partition."""

from __future__ import annotations

import logging

from pipesight.context import Observer, Where
from pipesight.logs.context_filter import attributes, lines

__all__ = ["TaskLog"]

MESSAGE = "Micro-batch %d (partition %d): checkpoint_stop=%d, using_checkpointing=%s"


class TaskLog(Observer):
    """Logs each forward task at INFO. It is one of `context.DEFAULT_OBSERVERS`; the logger's level turns it on.

    The level is read once a pass.
    """

    def wanted(self) -> bool:
        """Tell whether anyone would see the lines."""
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
