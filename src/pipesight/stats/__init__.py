"""Log statistics of tensors during training. A YAML file selects the layers, tensors, statistics and steps.

`watch` logs the tensors of a model's layers without changes to the training loop::

    with pipesight.stats.watch(model, "stats.yaml", log_dir="run"):
        train(model)

Or log tensors yourself::

    import pipesight.stats as debug_api

    debug_api.initialize("stats.yaml", log_dir="run")
    debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
    debug_api.step()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesight._lazy import lazily

if TYPE_CHECKING:
    from pipesight.stats.api import (
        end_debug,
        explain_features,
        get_tensor_reduction_group,
        infer_and_assign_layer_names,
        initialize,
        initialize_training_step,
        list_features,
        log_message,
        log_scalar,
        log_tensor_stats,
        set_tensor_reduction_group,
        step,
    )
    from pipesight.stats.config import ConfigError
    from pipesight.stats.model_watch import Watch, watch
    from pipesight.stats.moments import Moments
    from pipesight.stats.moments.cpu_moments import measure
    from pipesight.stats.nonfinite import NonfiniteError
    from pipesight.stats.rank_exchange import MissingRankError
    from pipesight.stats.registry import api_method, register_feature
    from pipesight.stats.sinks import (
        BaseLogger,
        FileSink,
        JsonlSink,
        LoggerSink,
        MlflowSink,
        Record,
        Sink,
        TensorBoardSink,
        WandbSink,
    )

# Reading a configuration needs no torch, which takes seconds to import.
_HOMES = {
    "BaseLogger": "sinks",
    "ConfigError": "config",
    "FileSink": "sinks",
    "JsonlSink": "sinks",
    "LoggerSink": "sinks",
    "MissingRankError": "rank_exchange",
    "MlflowSink": "sinks",
    "Moments": "moments",
    "NonfiniteError": "nonfinite",
    "Record": "sinks",
    "Sink": "sinks",
    "TensorBoardSink": "sinks",
    "WandbSink": "sinks",
    "Watch": "model_watch",
    "api_method": "registry",
    "measure": "moments.cpu_moments",
    "register_feature": "registry",
    "watch": "model_watch",
}  # the others are in api

__all__ = [
    "BaseLogger",
    "ConfigError",
    "FileSink",
    "JsonlSink",
    "LoggerSink",
    "MissingRankError",
    "MlflowSink",
    "Moments",
    "NonfiniteError",
    "Record",
    "Sink",
    "TensorBoardSink",
    "WandbSink",
    "Watch",
    "api_method",
    "end_debug",
    "explain_features",
    "get_tensor_reduction_group",
    "infer_and_assign_layer_names",
    "initialize",
    "initialize_training_step",
    "list_features",
    "log_message",
    "log_scalar",
    "log_tensor_stats",
    "measure",
    "register_feature",
    "set_tensor_reduction_group",
    "step",
    "watch",
]

_MODULES = {name: f"{__name__}.{_HOMES.get(name, 'api')}" for name in __all__}
__getattr__, __dir__ = lazily(__name__, _MODULES)
