"""The context as attributes of log records."""

from __future__ import annotations

import logging

from pipesight import context
from pipesight._logger import OwnLogger
from pipesight.context import Where

__all__ = ["ContextFilter", "attributes", "lines", "logger"]

logger = logging.getLogger("pipesight.pipeline")
lines = OwnLogger(logger)


def attributes(where: Where | None) -> dict[str, object]:
    """Return what a format string can show: ``%(step)s %(partition)s %(microbatch)s %(phase)s %(layer)s``."""
    names = ("step", "partition", "microbatch", "phase", "layer")
    if where is None:
        return {**dict.fromkeys(names), "step": context.counted_step()}
    return {name: getattr(where, name) for name in names}


class ContextFilter(logging.Filter):
    """Gives every record the attributes of the context, also those that your own layers and libraries log.

    Outside of a partition they are ``None``, but for the step while a run is observed. ::

        handler.addFilter(ContextFilter())
        handler.setFormatter(logging.Formatter("[%(partition)s/%(microbatch)s] %(message)s"))
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes that are missing; let every record pass."""
        for name, value in attributes(context.current()).items():
            record.__dict__.setdefault(name, value)
        return True
