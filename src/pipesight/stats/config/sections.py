"""A configuration: which layers, tensors, statistics and steps are logged. It is checked whole when it is read.

A file has sections, each with layers and features::

    mlp:
      enabled: true
      layers:
        layer_types: [fc1, fc2]
      LogTensorStats:
        enabled: true
        tensors: [activation, gradient]
        stats: [mean, std, l2_norm]
        freq: 10
      transformer_engine:
        LogFp8TensorStats:
          enabled: true
          tensors: all
          stats: [underflows%]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipesight.stats.config._check import check_enabled, check_layers, check_level, check_mapping, find_features
from pipesight.stats.config._check_feature import FeatureCheck
from pipesight.stats.config._yaml import read_dict, read_yaml
from pipesight.stats.config.rules import NOTHING, RuleTable, TensorRule
from pipesight.stats.config.selection import MOST_REMEMBERED, Selection
from pipesight.stats.config_errors import ConfigError, Document, Mistakes, placed
from pipesight.stats.registry import Registry, default_registry

__all__ = ["Config", "FeatureConfig", "Section", "load", "selection_of"]


@dataclass(frozen=True, slots=True)
class FeatureConfig:
    """One feature of a section.

    Attributes:
        namespace: ``"base"``, or the namespace it is written under.
        enabled: Whether it is on.
        settings: What is written under it.
        line: Where it stands; ``None`` without a file.
        table: The rules for calls that name no GEMM, and for all GEMMs if the settings name none.
        gemms: The rules by GEMM, if the settings name GEMMs.
    """

    namespace: str
    name: str
    enabled: bool
    settings: Mapping[str, Any]
    line: int | None = None
    table: RuleTable = NOTHING
    gemms: Mapping[str, RuleTable] = field(default_factory=dict)

    def rule(self, tensor_name: str, gemm: str | None = None) -> TensorRule | None:
        """Return what to log of a tensor; ``None`` for nothing."""
        table = self.gemms.get(gemm, self.table) if gemm is not None else self.table
        return table.tensors.get(tensor_name, table.otherwise)

    def rules(self) -> Iterator[TensorRule]:
        """Yield all its rules."""
        for table in (self.table, *self.gemms.values()):
            yield from table.tensors.values()
            if table.otherwise is not None:
                yield table.otherwise


@dataclass(frozen=True, slots=True)
class Section:
    """Some layers, and the features that watch them."""

    name: str
    enabled: bool
    selection: Selection
    features: tuple[FeatureConfig, ...]
    line: int | None = None

    def feature(self, namespace: str, name: str) -> FeatureConfig | None:
        """Return an enabled feature of the section; ``None`` if it has none of that name."""
        for feature in self.features:
            if feature.name == name and feature.namespace == namespace and feature.enabled:
                return feature
        return None


@dataclass(frozen=True, slots=True)
class Config:
    """The sections of a configuration, and the file they come from.

    Example::

        >>> config = load("config.yaml")
        >>> config.section_for("decoder.layers.0.fc1").name
        'mlp'
    """

    sections: tuple[Section, ...] = ()
    source: str = ""
    _found: dict[str, Section | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def section_for(self, layer_name: str) -> Section | None:
        """Return the enabled section that selects a layer, ``None`` without one; `ConfigError` if two do."""
        try:
            return self._found[layer_name]
        except KeyError:
            return self.select([layer_name]).get(layer_name)

    def select(self, layer_names: Iterable[str]) -> dict[str, Section]:
        """Return the section of each layer that one selects; `ConfigError` names all that two select."""
        selected: dict[str, Section] = {}
        mistakes = []
        layer_names = list(layer_names)
        for section in self.sections:
            if section.enabled:
                section.selection.learn(layer_names)
        for layer in layer_names:
            claims = [section for section in self.sections if section.enabled and section.selection.matches(layer)]
            if len(claims) > 1:
                mistakes.append(self._claimed_twice(layer, claims))
                continue
            if len(self._found) < MOST_REMEMBERED:
                self._found[layer] = claims[0] if claims else None
            if claims:
                selected[layer] = claims[0]
        if mistakes:
            raise ConfigError(self.source, mistakes)
        return selected

    def _claimed_twice(self, layer: str, claims: list[Section]) -> str:
        places = [f"{section.name!r}{f' (line {section.line})' if section.line else ''}" for section in claims]
        rule = f"layer {layer!r} is selected by the sections {' and '.join(places)}"
        return placed(self.source, claims[-1].line, f"{rule}; change the layers of one, or set enabled: false in it")


def load(config: str | Path | Mapping[str, Any], registry: Registry | None = None) -> Config:
    """Read a configuration and check all of it.

    It is a YAML file, or what one would hold as a dict; ``""`` for no features. By default, the features are those that
    decorators registered.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It has mistakes; the error lists them all.
    """
    if isinstance(config, str) and not config:
        return Config()
    if isinstance(config, Mapping):
        document: Document = read_dict(config)
    elif isinstance(config, str | Path):
        document = read_yaml(config)
    else:
        raise TypeError(f"a configuration must be a path or a dict (found: {type(config).__name__})")
    return _build(document, default_registry() if registry is None else registry)


def selection_of(layers: Mapping[str, Any]) -> Selection:
    """Return what the ``layers`` of a section select; `ConfigError` lists all mistakes."""
    mistakes = Mistakes(read_dict({"layers": layers}))
    selection = check_layers(layers, ("layers",), mistakes)
    if mistakes:
        raise mistakes.error()
    return selection


def _build(document: Document, registry: Registry) -> Config:
    mistakes = Mistakes(document)
    for line, flaw in document.flaws:
        mistakes.at_line(line, flaw)
    if document.value is None or document.value == {}:
        mistakes.add((), "is empty; add a section")
        raise mistakes.error()
    named = check_mapping(document.value, (), mistakes, "from names of sections to sections") or {}
    sections = [
        _section(name, value, document, registry, mistakes)
        for name, value in named.items()
        if not check_level(name, value, registry, mistakes)
    ]
    if mistakes:
        raise mistakes.error()
    return Config(tuple(section for section in sections if section is not None), document.source)


def _section(name: str, value: Any, document: Document, registry: Registry, mistakes: Mistakes) -> Section | None:
    path = (name,)
    section = check_mapping(value, path, mistakes, "with enabled, layers and features")
    if section is None:
        return None
    enabled = check_enabled(section, path, mistakes)
    off = section.get("enabled") is False
    selection = Selection()
    if "layers" in section:
        selection = check_layers(section["layers"], (name, "layers"), mistakes)
    elif not off:
        mistakes.add(path, "must say which layers it selects; add layers: {layer_types: all}")
    if not off and section.keys() <= {"enabled", "layers"}:
        mistakes.add(path, "must have a feature, such as LogTensorStats")
    features = []
    for namespace, feature, where, settings in find_features(section, path, registry, mistakes):
        check = FeatureCheck(registry.feature(namespace, feature), namespace, mistakes)
        on, written, table, gemms = check.check(settings, where)
        features.append(FeatureConfig(namespace, feature, on, written, document.line(where), table, gemms))
    return Section(name, enabled, selection, tuple(features), document.line(path))
