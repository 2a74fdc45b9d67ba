"""Give log records the step, partition, micro-batch, phase and layer that is running."""

from __future__ import annotations

import logging

from pipesight import context
from pipesight._logger import OwnLogger
from pipesight.context import Where

__all__ = ["ContextFilter", "attributes", "lines", "logger"]

logger = logging.getLogger("pipesight.pipeline")
lines = OwnLogger(logger)


def attributes(where: Where | None) -> dict[str, object]:
    """Return the attributes for format strings: ``%(step)s %(partition)s %(microbatch)s %(phase)s %(layer)s``."""
    names = ("step", "partition", "microbatch", "phase", "layer")
    if where is None:
        return {**dict.fromkeys(names), "step": context.counted_step()}
    return {name: getattr(where, name) for name in names}


class ContextFilter(logging.Filter):
    """Adds ``step``, ``partition``, ``microbatch``, ``phase`` and ``layer`` to every record that passes it.

    That includes records of your own layers and of libraries. Outside a partition the attributes are ``None``, except
    ``step`` while a run is observed. ::

        handler.addFilter(ContextFilter())
        handler.setFormatter(logging.Formatter("[%(partition)s/%(microbatch)s] %(message)s"))
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes that are missing; return true for every record."""
        for name, value in attributes(context.current()).items():
            record.__dict__.setdefault(name, value)
        return True
