"""``nvdlfw_inspect.config_manager``: the configuration of a layer, as dictionaries by namespace and feature."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from pipesight.stats.config import Section, selection_of
from pipesight.stats.config.selection import Selection
from pipesight.stats.current_session import running, running_or_none
from pipesight.stats.stats_session import StatsSession

__all__ = ["ConfigManager", "ConfigSpec", "is_layer_in_cfg"]

Settings = dict[str, dict[str, dict[str, Any]]]


class ConfigSpec:
    """One section.

    Attributes:
        enabled: Whether the section is on.
        layers: Which layers it is about.
        extension_config: The settings of each feature, by namespace and name.
    """

    def __init__(self, section: Section | None = None) -> None:
        self.reset()
        if section is not None:
            self.enabled, self.layers = section.enabled, section.selection
            for feature in section.features:
                settings = {**copy.deepcopy(dict(feature.settings)), "enabled": feature.enabled}
                self.extension_config.setdefault(feature.namespace, {})[feature.name] = settings

    def initialize(self, cfg: Mapping[str, Any]) -> None:
        """Take ``enabled`` and ``layers`` of a section.

        Raises:
            ConfigError: They have mistakes.
        """
        self.enabled, self.layers = cfg["enabled"], selection_of(cfg["layers"])

    def add_extension(self, ext: str, args: dict[str, dict[str, Any]]) -> None:
        """Set the features of a namespace."""
        self.extension_config[ext] = args

    def reset(self) -> None:
        """Select no layers, and have no features."""
        self.enabled = False
        self.layers = Selection(exact=frozenset())
        self.extension_config: Settings = {}


_of_layers: WeakKeyDictionary[StatsSession, dict[str, Settings]] = WeakKeyDictionary()


class ConfigManager:
    """The sections of the session that is open."""

    @staticmethod
    def get_config_for_layer(layer_name: str) -> Settings:
        """Return the settings that apply to a layer by namespace and feature; ``{}`` if no section selects it.

        Example::

            >>> ConfigManager.get_config_for_layer("fc1")
            {'base': {'LogTensorStats': {'enabled': True, 'tensors': ['activation'], 'stats': ['max']}}}

        Raises:
            ConfigError: Two sections claim the layer.
        """
        session = running()
        known = _of_layers.setdefault(session, {})
        if layer_name not in known:
            section = session.config.section_for(layer_name)
            known[layer_name] = {} if section is None else ConfigSpec(section).extension_config
        return known[layer_name]

    @staticmethod
    def reset() -> None:
        """Forget the configuration: the open session selects nothing any more."""
        session = running_or_none()
        if session is not None:
            session.forget_config()
            _of_layers.pop(session, None)


def is_layer_in_cfg(layer_name: str, cfg: ConfigSpec) -> bool:
    """Return whether a section is about a layer."""
    return cfg.layers.matches(layer_name)
