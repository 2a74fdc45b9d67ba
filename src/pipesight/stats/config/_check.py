"""Checking sections and their layers, and building what they select."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pipesight.stats.config._patterns import Pattern, compiled
from pipesight.stats.config.selection import LAYER_KEYS, Selection
from pipesight.stats.config.steps import is_integer
from pipesight.stats.config_errors import Mistakes, Path, dotted, nearest, shown
from pipesight.stats.registry import BASE, Registry

__all__ = ["check_enabled", "check_layers", "check_level", "check_mapping", "check_names", "find_features"]

ALL = "all"
SECTION_KEYS = ("enabled", "layers")
MOST_NUMBERS = 1_000_000
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")


def check_mapping(value: Any, path: Path, mistakes: Mistakes, what: str) -> dict[str, Any] | None:
    """Return the items of a mapping whose keys are words, without those that are not."""
    if not isinstance(value, dict):
        found = "it is empty" if value is None else f"found: {shown(value)}"
        mistakes.add(path, f"must be a mapping, {what} ({found})")
        return None
    for key in value:
        if not isinstance(key, str):
            why = " (YAML reads on, off, yes and no as true or false)" if isinstance(key, bool) else ""
            mistakes.add((*path, key), f"a key must be a word (found: {shown(key)}); write it in quotes{why}")
    return {key: item for key, item in value.items() if isinstance(key, str)}


def check_level(name: str, value: Any, registry: Registry, mistakes: Mistakes) -> bool:
    """Tell whether what stands at the top, among the sections, belongs into one; that is a mistake."""
    if isinstance(value, dict) and "layers" in value:
        return False
    features = [feature for space in registry.namespaces for feature in registry.feature_names(space)]
    if name in SECTION_KEYS:
        mistakes.add((name,), "is a key of a section; give the section a name, in a line before it, and indent it")
    elif name in features or name in registry.namespaces:
        what = "feature" if name in features else "namespace"
        mistakes.add(
            (name,),
            f"is a {what}, which stands in a section; indent it, below my_section: "
            f"{{enabled: true, layers: {{layer_types: all}}, {name}: ...}}",
        )
    else:
        return False
    return True


def check_enabled(settings: dict[str, Any], path: Path, mistakes: Mistakes) -> bool:
    """Return the switch that every section and feature has."""
    if "enabled" not in settings:
        mistakes.add(path, f"must say whether it is enabled{_misspelt('enabled', settings)}; add enabled: true")
        return False
    enabled = settings["enabled"]
    if not isinstance(enabled, bool):
        word = enabled.lower() if isinstance(enabled, str) else ""
        fix = f"; write {word} without quotes" if word in ("true", "false") else ""
        mistakes.add((*path, "enabled"), f"must be true or false (enabled: {shown(enabled)}){fix}")
        return False
    return enabled


def _misspelt(word: str, settings: dict[str, Any]) -> str:
    for key in settings:
        if key.lower() == word or nearest(key, [word]).endswith("?"):
            return f" (found: {key!r})"
    return ""


def check_names(value: Any, path: Path, mistakes: Mistakes, *, may_be_all: bool = True) -> tuple[str, ...] | None:
    """Return a list of names; ``("all",)`` for the word all."""
    key = path[-1]
    if may_be_all and value == ALL:
        return (ALL,)
    if isinstance(value, str):
        mistakes.add(path, f"must be a list of names ({key}: {shown(value)}); write {key}: [{value}]")
        return None
    if not isinstance(value, list) or not value:
        some = " or the word all" if may_be_all else ""
        mistakes.add(path, f"must be a list of names{some} ({key}: {shown(value)})")
        return None
    seen: set[str] = set()
    for i, name in enumerate(value):
        if not isinstance(name, str) or not name:
            mistakes.add((*path, i), f"must be a name ({key}[{i}]: {shown(name)}); write it in quotes")
            continue
        if name in seen:
            mistakes.add((*path, i), f"is given twice ({key}: {shown(name)}); remove one")
        seen.add(name)
    names = tuple(name for name in value if isinstance(name, str))
    return (ALL,) if may_be_all and ALL in names else names


def check_layers(value: Any, path: Path, mistakes: Mistakes) -> Selection:
    """Return the layers that ``layers`` of a section selects."""
    layers = check_mapping(value, path, mistakes, "such as layers: {layer_types: [fc1, fc2]}")
    if layers is None:
        return Selection()
    for key in layers:
        if key not in LAYER_KEYS:
            mistakes.add((*path, key), f"unknown layer selector{nearest(key, LAYER_KEYS)}")
    if not any(key in LAYER_KEYS for key in layers):
        if not layers:
            mistakes.add(path, f"must select layers by at least one of {', '.join(LAYER_KEYS)}")
        return Selection()

    def read(key: str, check: Callable[[Any, Path, Mistakes], Any]) -> Any:
        return check(layers[key], (*path, key), mistakes) if key in layers else None

    exact = read("exact_layer_names", _exact)
    pattern = read("layer_name_regex_pattern", _pattern)
    types = read("layer_types", check_names)
    numbers = read("layer_numbers", _numbers)
    given = [key for key in LAYER_KEYS if key in layers]
    counted = given[:1] if given[0] in LAYER_KEYS[:2] else given
    return Selection(
        exact=exact,
        pattern=pattern,
        types=None if types == (ALL,) else types,
        numbers=numbers,
        ignored=tuple(key for key in given if key not in counted),
    )


def _exact(value: Any, path: Path, mistakes: Mistakes) -> frozenset[str] | None:
    if value == ALL:
        mistakes.add(path, "must be a list of names (exact_layer_names: 'all'); to select all, write layer_types: all")
        return None
    names = check_names(value, path, mistakes, may_be_all=False)
    return None if names is None else frozenset(names)


def _pattern(value: Any, path: Path, mistakes: Mistakes) -> Pattern | None:
    if not isinstance(value, str):
        mistakes.add(path, f"must be a regular expression (layer_name_regex_pattern: {shown(value)})")
        return None
    try:
        return compiled(value, dotted(path), *mistakes.place(path))
    except (re.error, OverflowError, RecursionError) as error:
        mistakes.add(path, f"must be a regular expression (layer_name_regex_pattern: {shown(value)}): {error}")
        return None


def _numbers(value: Any, path: Path, mistakes: Mistakes) -> frozenset[int] | None:
    if value == ALL:
        return None
    if not isinstance(value, list) or not value:
        fix = f"; write layer_numbers: [{value}]" if isinstance(value, int | str) else ""
        mistakes.add(path, f"must be a list of numbers or the word all (layer_numbers: {shown(value)}){fix}")
        return None
    if ALL in value:
        return None
    numbers: set[int] = set()
    total = 0
    for i, item in enumerate(value):
        span = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if span and int(span[1]) <= int(span[2]) < MOST_NUMBERS:
            total += int(span[2]) + 1 - int(span[1])
            if total > MOST_NUMBERS:
                mistakes.add((*path, i), f"the ranges must have {MOST_NUMBERS:,} numbers or fewer together")
                break
            numbers.update(range(int(span[1]), int(span[2]) + 1))
        elif is_integer(item) and item >= 0:
            numbers.add(item)
        else:
            rule = "must be an integer of 0 or more, or a range such as '0-3'"
            mistakes.add((*path, i), f"{rule} (layer_numbers[{i}]: {shown(item)})")
    return frozenset(numbers)


def find_features(
    section: dict[str, Any], path: Path, registry: Registry, mistakes: Mistakes
) -> list[tuple[str, str, Path, Any]]:
    """Return the features of a section: namespace, name, path and settings."""
    found: list[tuple[str, str, Path, Any]] = []
    base = registry.feature_names(BASE)
    for key, value in section.items():
        if key in SECTION_KEYS:
            continue
        if key in base:
            found.append((BASE, key, (*path, key), value))
        elif key in registry.namespaces:
            named = check_mapping(value, (*path, key), mistakes, f"the features of the namespace {key}") or {}
            if value == {}:
                mistakes.add((*path, key), f"must hold features of the namespace {key}; it is empty")
            for name, settings in named.items():
                if name in registry.feature_names(key):
                    found.append((key, name, (*path, key, name), settings))
                else:
                    close = nearest(name, registry.feature_names(key))
                    mistakes.add((*path, key, name), f"is not a feature of the namespace {key}{close}")
        else:
            mistakes.add((*path, key), _unknown(key, value, registry))
    seen: set[tuple[str, str]] = set()
    for namespace, name, where, _ in found:
        if (namespace, name) in seen:
            mistakes.add(where, f"is already given in this section ({namespace}.{name}); remove one")
        seen.add((namespace, name))
    return found


def _unknown(key: str, value: Any, registry: Registry) -> str:
    homes = [space for space in registry.namespaces if key in registry.feature_names(space)]
    if homes:
        return f"is a feature of the namespace {homes[0]}, not of {BASE}; write it under the key {homes[0]}"
    if (
        isinstance(value, dict)
        and value
        and "enabled" not in value
        and all(isinstance(v, dict) for v in value.values())
    ):
        return f"is neither a namespace nor a feature{nearest(key, [*registry.namespaces, *registry.feature_names()])}"
    words = [*registry.feature_names(), *SECTION_KEYS, *(space for space in registry.namespaces if space != BASE)]
    return f"is not a feature{nearest(key, words)}"
