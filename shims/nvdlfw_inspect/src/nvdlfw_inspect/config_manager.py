"""``nvdlfw_inspect.config_manager``, for pipesight."""

from pipesight.stats.extensions import ConfigManager, ConfigSpec, is_layer_in_cfg

__all__ = ["ConfigManager", "ConfigSpec", "is_layer_in_cfg"]
