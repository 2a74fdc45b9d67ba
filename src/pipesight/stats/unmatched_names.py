"""Names in a configuration that match no layer or tensor: probably misspelled."""

from __future__ import annotations

from collections.abc import Collection

from pipesight.stats.config import Section
from pipesight.stats.config_errors import nearest

__all__ = ["OUTPUTS", "TENSORS", "missing_layers", "unknown_tensors"]

OUTPUTS = ("activation", "output")
TENSORS = ("input", *OUTPUTS, "gradient", "dgrad", "weight", "wgrad")
"""The tensors of a layer that `watch` logs."""


def missing_layers(section: Section, layers: Collection[str]) -> list[str]:
    """Return a line for each of ``exact_layer_names`` that is no layer.

    Example::

        >>> missing_layers(section, ["fc1", "fc2"])
        ["no layer is called 'fc3'; did you mean 'fc2'?"]
    """
    names = sorted((section.selection.exact or frozenset()) - {*layers})
    return [f"no layer is called {name!r}{_hint(name, layers)}" for name in names]


def unknown_tensors(section: Section) -> list[str]:
    """Return a line for each tensor that the features of a section name and `watch` does not log."""
    names = {tensor for feature in section.features if feature.enabled for tensor in feature.table.tensors}
    return [
        f"watch() has no tensor {name!r}{nearest(name, TENSORS)}; log it yourself with log_tensor_stats"
        for name in sorted(names - {*TENSORS})
    ]


def _hint(name: str, words: Collection[str]) -> str:
    close = nearest(name, words)
    return close if close.endswith("?") else ""
