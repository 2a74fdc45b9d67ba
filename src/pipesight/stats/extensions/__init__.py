"""The classes and functions for extensions: namespaces, features, settings, loggers, with nvdlfw_inspect's names."""

from pipesight.stats.extensions.config_mapper import BaseConfigAPIMapper, GenericConfigAPIMapper, GenericFrameworkAPI
from pipesight.stats.extensions.helpers import (
    APICacheIdentifier,
    append_parent_docstring,
    gather_along_first_dim,
    import_and_exec_module,
)
from pipesight.stats.extensions.layer_config import ConfigManager, ConfigSpec, is_layer_in_cfg
from pipesight.stats.extensions.loggers import MetricLogger, get_logger, print_rank_0, wrap_tensorboard_writer
from pipesight.stats.extensions.measuring_feature import LogTensorStats
from pipesight.stats.extensions.namespace_api import BaseNamespaceAPI
from pipesight.stats.extensions.registration import Registry

__all__ = [
    "APICacheIdentifier",
    "BaseConfigAPIMapper",
    "BaseNamespaceAPI",
    "ConfigManager",
    "ConfigSpec",
    "GenericConfigAPIMapper",
    "GenericFrameworkAPI",
    "LogTensorStats",
    "MetricLogger",
    "Registry",
    "append_parent_docstring",
    "gather_along_first_dim",
    "get_logger",
    "import_and_exec_module",
    "is_layer_in_cfg",
    "print_rank_0",
    "wrap_tensorboard_writer",
]
