"""The import names of torchgpipe, for pipesight."""

from pipesight import GPipe, current_microbatch, is_checkpointing, is_recomputing
from pipesight._shim_conflicts import refuse_beside

from .pipeline import register_layer_logging_hooks

__all__ = [
    "GPipe",
    "__version__",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
    "register_layer_logging_hooks",
]

refuse_beside(__file__, "pipesight-torchgpipe", "torchgpipe")
__version__ = "0.0.7+pipesight"
