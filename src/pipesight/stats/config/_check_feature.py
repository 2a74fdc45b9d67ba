"""Checking the settings of one feature, and working out a rule for each of its tensors.

Settings come in levels: those of the feature, those of an entry of ``gemms_struct``, those of an entry of
``tensors_struct``. An inner level overrides an outer one, key by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipesight.stats.config._check import ALL, check_enabled, check_mapping, check_names
from pipesight.stats.config.rules import NOTHING, RuleTable, StatisticRequest, TensorRule
from pipesight.stats.config.steps import Steps, is_integer, step_mistakes
from pipesight.stats.config_errors import Mistakes, Path, nearest, shown

__all__ = ["GEMM_KEYS", "NONFINITE", "TENSOR_KEYS", "FeatureCheck"]

TENSOR_KEYS = frozenset({"tensors", "tensors_struct"})
GEMM_KEYS = frozenset({"gemms", "gemms_struct"})
NONFINITE = ("warn", "raise", "dump")

Level = tuple[Mapping[str, Any], Path]

# Transformer Engine's defaults.
_BLOCKWISE = "max_blockwise_dynamic_range"
_BLOCKWISE_OPTIONS = {"block_size": 32, "dims": 1}


class FeatureCheck:
    """Checks the settings of one feature.

    The ``keys``, ``statistics`` and ``tensors`` of the ``feature`` say what it knows, its ``setting_mistakes`` what is
    wrong with settings of its own.
    """

    def __init__(self, feature: Any, namespace: str, mistakes: Mistakes) -> None:
        self._keys = _words(feature, "keys")
        self._statistics = _words(feature, "statistics")
        self._tensors = _words(feature, "tensors")
        self._own_mistakes: Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]
        self._own_mistakes = getattr(feature, "setting_mistakes", lambda _: ())
        self._inclusive = namespace == "transformer_engine"
        self._mistakes = mistakes

    def check(self, value: Any, path: Path) -> tuple[bool, dict[str, Any], RuleTable, dict[str, RuleTable]]:
        """Return whether the feature is on, its settings, its rules, and its rules by GEMM."""
        settings = check_mapping(value, path, self._mistakes, "such as {enabled: true, tensors: [activation]}")
        if settings is None:
            return False, {}, NOTHING, {}
        enabled = check_enabled(settings, path, self._mistakes)
        self._check_keys(settings, path, {"enabled"}, frozenset())
        level = (settings, path)
        self._exclusive(level, "gemms", "gemms_struct")
        if "gemms_struct" in settings:
            if not TENSOR_KEYS.isdisjoint(settings):
                self._table([level])  # what entries that name no tensors take over
            tables = self._entries([level], "gemms_struct", "gemm", self._table)
            return enabled, settings, NOTHING, tables
        table = self._table([level])
        if "gemms" in settings:
            gemms = check_names(settings["gemms"], (*path, "gemms"), self._mistakes) or ()
            if ALL not in gemms:
                return enabled, settings, NOTHING, {gemm: self._table([level], gemm=gemm) for gemm in gemms}
        return enabled, settings, table, {}

    def _table(self, levels: list[Level], *, gemm: str | None = None) -> RuleTable:
        """Return the rules for the tensors that the innermost level which names tensors names."""
        for settings, path in reversed(levels):
            self._exclusive((settings, path), "tensors", "tensors_struct")
            if "tensors_struct" in settings:
                rules = self._entries(levels, "tensors_struct", "tensor", self._rule, at=(settings, path))
                return RuleTable({name: rule for name, rule in rules.items() if name != ALL}, rules.get(ALL))
            if "tensors" in settings:
                given = settings["tensors"]
                given = [given] if isinstance(given, str) else given
                names = check_names(given, (*path, "tensors"), self._mistakes) or ()
                if ALL in names:
                    return RuleTable({}, self._rule(levels, gemm=gemm))
                for i, name in enumerate(names):
                    self._check_tensor(name, (*path, "tensors", i))
                return RuleTable({name: self._rule([*levels, ({"tensor": name}, path)], gemm=gemm) for name in names})
        if self._keys is not None and "tensors" in self._keys:
            self._mistakes.add(levels[-1][1], "must name its tensors; add tensors: [...] or tensors: all")
        return RuleTable({}, self._rule(levels, gemm=gemm))

    def _entries(
        self,
        levels: list[Level],
        key: str,
        word: str,
        make: Callable[[list[Level]], Any],
        *,
        at: Level | None = None,
    ) -> dict[str, Any]:
        """Return what ``make`` makes of each entry of a list such as ``tensors_struct``, by the name of the entry."""
        settings, path = at or levels[-1]
        path = (*path, key)
        example = f"such as {key}: [{{{word}: ...}}]"
        if not isinstance(settings[key], list) or not settings[key]:
            self._mistakes.add(path, f"must be a list of mappings, {example} ({key}: {shown(settings[key])})")
            return {}
        made: dict[str, Any] = {}
        for i, value in enumerate(settings[key]):
            where = (*path, i)
            entry = check_mapping(value, where, self._mistakes, example)
            if entry is None:
                continue
            outer = GEMM_KEYS | TENSOR_KEYS if word == "tensor" else GEMM_KEYS
            self._check_keys(entry, where, {word}, outer)
            name = entry.get(word)
            if not isinstance(name, str) or not name:
                self._mistakes.add(where, f"must name its {word} ({word}: {shown(name)})")
                continue
            if name in made:
                self._mistakes.add((*where, word), f"is already in this list ({word}: {shown(name)}); remove one")
                continue
            if word == "tensor":
                self._check_tensor(name, (*where, word))
            made[name] = make([*levels, (entry, where)])
        return made

    def _rule(self, levels: list[Level], *, gemm: str | None = None) -> TensorRule:
        merged: dict[str, Any] = {}
        origin: dict[str, Path] = {}
        for settings, path in levels:
            self._check_level(settings, path)
            if "start_end_list" in settings:
                _forget(merged, ("start_step", "end_step"))
            elif "start_step" in settings or "end_step" in settings:
                _forget(merged, ("start_end_list",))
            merged.update(settings)
            origin.update(dict.fromkeys(settings, path))
        _forget(merged, {"enabled", *TENSOR_KEYS, *GEMM_KEYS})
        if gemm is not None:
            merged["gemm"] = gemm
        broken = list(step_mistakes(merged, inclusive=self._inclusive))
        for key, text in broken:
            self._mistakes.add((*origin[key], key), text)
        stats: tuple[StatisticRequest, ...] = ()
        if "stats" in merged:
            stats = self._stats(merged["stats"], (*origin["stats"], "stats"))
        elif self._keys is not None and "stats" in self._keys and "on_nonfinite" not in merged:
            self._mistakes.add(levels[-1][1], "must name its statistics; add stats: [min, max, mean]")
        steps = Steps() if broken else Steps.from_settings(merged, inclusive=self._inclusive)
        return TensorRule(stats, steps, merged.get("on_nonfinite"), merged)

    def _check_level(self, settings: Mapping[str, Any], path: Path) -> None:
        """Check what one level says by itself, even where an inner level overrides it."""
        for key, text in (*step_mistakes(settings, inclusive=self._inclusive), *self._own_mistakes(settings)):
            self._mistakes.add((*path, key), text)
        if "stats" in settings:
            self._stats(settings["stats"], (*path, "stats"))
        word = settings.get("on_nonfinite")
        if "on_nonfinite" in settings and word not in NONFINITE:
            close = nearest(word, NONFINITE)
            hint = close if close.endswith("?") else ""
            rule = f"must be one of {', '.join(NONFINITE)} (on_nonfinite: {shown(word)}){hint}"
            self._mistakes.add((*path, "on_nonfinite"), rule)

    def _stats(self, value: Any, path: Path) -> tuple[StatisticRequest, ...]:
        if isinstance(value, str):
            listed = value if value != ALL else "mean, std"  # there is no word for all of them
            self._mistakes.add(path, f"must be a list of statistics (stats: {shown(value)}); write stats: [{listed}]")
            return ()
        if not isinstance(value, list) or not value:
            self._mistakes.add(path, f"must be a list of statistics (stats: {shown(value)})")
            return ()
        requests: dict[str, StatisticRequest] = {}
        for i, item in enumerate(value):
            where = (*path, i)
            if isinstance(item, dict) and len(item) == 1:
                ((name, options),) = item.items()
            else:
                name, options = item, {}
            if not isinstance(name, str):
                self._mistakes.add(where, f"must be the name of a statistic (stats[{i}]: {shown(item)})")
                continue
            request = self._request(name, options, where)
            if request is not None and request.label in requests:
                self._mistakes.add(where, f"is given twice (stats: {shown(item)}); remove one")
            elif request is not None:
                requests[request.label] = request
        return tuple(requests.values())

    def _request(self, name: str, options: Any, path: Path) -> StatisticRequest | None:
        known = self._statistics
        if known is not None and name not in known:
            if name.lower() not in known:
                self._mistakes.add(path, f"{name!r} is not a statistic of this feature{nearest(name, known)}")
                return None
            name = name.lower()  # as nvdlfw_inspect reads it
        if not isinstance(options, dict):
            self._mistakes.add(path, f"the options of {name} must be a mapping (found: {shown(options)})")
            return None
        if known is None and name != _BLOCKWISE:
            return StatisticRequest(name, tuple(options.items()))
        defaults = _BLOCKWISE_OPTIONS if name == _BLOCKWISE else {}
        for key, value in options.items():
            if key not in defaults:
                why = nearest(key, defaults) if defaults else "; it has none"
                self._mistakes.add((*path, name, key), f"unknown option of {name}{why}")
            elif not is_integer(value) or value < 1 or (key == "dims" and value > 2):
                rule = "1 or 2" if key == "dims" else "an integer of 1 or more"
                self._mistakes.add((*path, name, key), f"must be {rule} ({key}: {shown(value)})")
        return StatisticRequest(name, tuple({**defaults, **options}.items()))

    def _check_tensor(self, name: str, path: Path) -> None:
        if self._tensors is not None and name != ALL and name not in self._tensors:
            self._mistakes.add(path, f"{name!r} is not a tensor of this feature{nearest(name, self._tensors)}")

    def _check_keys(self, settings: Mapping[str, Any], path: Path, own: set[str], outer: frozenset[str]) -> None:
        for key in settings:
            if key in own:
                continue
            if key in outer:
                self._mistakes.add((*path, key), "cannot be given here, only outside of this list")
            elif self._keys is not None and key not in self._keys:
                self._mistakes.add((*path, key), f"unknown setting{nearest(key, own | (self._keys - outer))}")

    def _exclusive(self, level: Level, one: str, other: str) -> None:
        settings, path = level
        if one in settings and other in settings:
            self._mistakes.add((*path, other), f"cannot be combined with {one}; remove one of them")


def _forget(settings: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        settings.pop(key, None)


def _words(feature: Any, attribute: str) -> frozenset[str] | None:
    words: Iterable[str] | None = getattr(feature, attribute, None)
    return None if words is None else frozenset(words)
