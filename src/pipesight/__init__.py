"""Train PyTorch models with pipeline parallelism, and see inside the pipe."""

from pipesight._version import __version__
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
