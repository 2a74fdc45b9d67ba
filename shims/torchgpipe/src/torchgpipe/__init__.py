"""The import names of torchgpipe, for pipesight."""

from pipesight import GPipe, current_microbatch, is_checkpointing, is_recomputing

from .pipeline import register_layer_logging_hooks

__all__ = [
    "GPipe",
    "__version__",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
    "register_layer_logging_hooks",
]

__version__ = "0.0.7+pipesight"
