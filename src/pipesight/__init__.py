"""Train PyTorch models with pipeline parallelism, and see inside the pipe."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipesight._version import __version__

if TYPE_CHECKING:
    from pipesight.context import current_microbatch, is_checkpointing, is_recomputing
    from pipesight.logs import register_layer_logging_hooks
    from pipesight.pipeline.gpipe import GPipe

__all__ = [
    "GPipe",
    "__version__",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
    "register_layer_logging_hooks",
]

# Importing torch takes seconds, and tracing and reports do without.
_HOMES = {
    "GPipe": "pipesight.pipeline.gpipe",
    "current_microbatch": "pipesight.context",
    "is_checkpointing": "pipesight.context",
    "is_recomputing": "pipesight.context",
    "register_layer_logging_hooks": "pipesight.logs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
