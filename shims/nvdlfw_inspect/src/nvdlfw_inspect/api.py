"""``nvdlfw_inspect.api``, for pipesight: imported ``as debug_api``."""

import pipesight.stats.api
from pipesight.stats.api import (
    end_debug,
    explain_features,
    get_tensor_reduction_group,
    infer_and_assign_layer_names,
    initialize_training_step,
    list_features,
    log_message,
    log_tensor_stats,
    set_tensor_reduction_group,
    step,
)
from pipesight.stats.extensions.namespaces import (
    attribute as __getattr__,
)  # namespaces, calls of features, DEBUG_MANAGER
from pipesight.stats.message_log import with_prefix
from pipesight.stats.sinks import BaseLogger

__all__ = [
    "BaseLogger",
    "__getattr__",
    "end_debug",
    "explain_features",
    "get_tensor_reduction_group",
    "infer_and_assign_layer_names",
    "initialize",
    "initialize_training_step",
    "list_features",
    "log_message",
    "log_tensor_stats",
    "set_tensor_reduction_group",
    "step",
]

initialize = with_prefix("NVDLFW INSPECT", pipesight.stats.api.initialize)
"""`pipesight.stats.initialize`, with warnings that begin as those of nvdlfw_inspect do."""
