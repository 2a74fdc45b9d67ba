"""The configuration of a layer as extensions read it: dictionaries by namespace and feature."""

from __future__ import annotations

from typing import Any

from pipesight.stats.config import Section
from pipesight.stats.current_session import running

__all__ = ["ConfigManager", "ConfigSpec", "is_layer_in_cfg"]


class ConfigSpec:
    """One section.

    Attributes:
        enabled: Whether the section is on.
        layers: Which layers it is about.
        extension_config: The settings of each feature, by namespace and name.
    """

    def __init__(self, section: Section) -> None:
        self.enabled = section.enabled
        self.layers = section.selection
        self.extension_config: dict[str, dict[str, dict[str, Any]]] = {}
        for feature in section.features:
            settings = {**feature.settings, "enabled": feature.enabled}
            self.extension_config.setdefault(feature.namespace, {})[feature.name] = settings


class ConfigManager:
    """The sections of the session that is open."""

    @staticmethod
    def get_config_for_layer(layer_name: str) -> dict[str, dict[str, dict[str, Any]]] | None:
        """Return the settings that apply to a layer by namespace and feature, or None.

        Example::

            >>> ConfigManager.get_config_for_layer("fc1")
            {'base': {'LogTensorStats': {'enabled': True, 'tensors': ['activation'], 'stats': ['max']}}}

        Raises:
            ConfigError: Two sections claim the layer.
        """
        section = running().config.section_for(layer_name)
        return None if section is None else ConfigSpec(section).extension_config


def is_layer_in_cfg(layer_name: str, cfg: ConfigSpec) -> bool:
    """Return whether a section is about a layer."""
    return cfg.layers.matches(layer_name)
