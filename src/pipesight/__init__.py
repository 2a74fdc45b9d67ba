"""Train PyTorch models with pipeline parallelism, and see inside the pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily
from pipesight._version import __version__

if TYPE_CHECKING:
    from pipesight.context import current_microbatch, is_checkpointing, is_recomputing
    from pipesight.logs import register_layer_logging_hooks
    from pipesight.pipeline.gpipe import GPipe
    from pipesight.recording import observe

__all__ = [
    "GPipe",
    "__version__",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
    "observe",
    "register_layer_logging_hooks",
]

# Importing torch takes seconds, and tracing and reports do without.
_HOMES = {
    "GPipe": "pipesight.pipeline.gpipe",
    "current_microbatch": "pipesight.context",
    "is_checkpointing": "pipesight.context",
    "is_recomputing": "pipesight.context",
    "observe": "pipesight.recording",
    "register_layer_logging_hooks": "pipesight.logs",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
