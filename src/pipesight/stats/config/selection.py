"""Which layers a section of a configuration selects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipesight.stats.config._patterns import Pattern

__all__ = ["LAYER_KEYS", "MOST_REMEMBERED", "Selection", "spans"]

LAYER_KEYS = ("exact_layer_names", "layer_name_regex_pattern", "layer_types", "layer_numbers")
"""The ways to select layers; each decides before those after it, but the last two work together."""

MOST_REMEMBERED = 100_000
"""Names whose answer is kept."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The layers of a section, by name.

    Example::

        >>> Selection(types=("fc1", "fc2"), numbers=frozenset({0, 1})).matches("decoder.layers.1.mlp.fc2")
        True

    Given several selectors, the strictest decides alone, as in nvdlfw_inspect: `exact` if there is one, or else
    `pattern`. Otherwise a layer must match both `types` and `numbers`, where given. What that leaves out is in
    `ignored`.

    Args:
        exact: Whole names.
        pattern: A regular expression that is found in the name.
        types: A name that contains one of them is selected; ``None`` for any name.
        numbers: A name of which one part between dots is one of these numbers is selected; ``None`` for any name.
        ignored: Selectors that were given, but do not count.
    """

    exact: frozenset[str] | None = None
    pattern: Pattern | None = None
    types: tuple[str, ...] | None = None
    numbers: frozenset[int] | None = None
    ignored: tuple[str, ...] = ()
    _known: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def learn(self, layer_names: Iterable[str]) -> None:
        """Decide on many layers at once, where that is cheaper."""
        if self.pattern is not None and self.exact is None:
            unknown = [name for name in layer_names if name not in self._known]
            for name, matches in self.pattern.match(unknown).items():
                if len(self._known) < MOST_REMEMBERED:
                    self._known[name] = matches

    def matches(self, layer_name: str) -> bool:
        """Say whether the layer is selected; `ConfigError` if the pattern takes too long."""
        known = self._known.get(layer_name)
        if known is None:
            known = self._decide(layer_name)
            if len(self._known) < MOST_REMEMBERED:
                self._known[layer_name] = known
        return known

    def _decide(self, name: str) -> bool:
        if self.exact is not None:
            return name in self.exact
        if self.pattern is not None:
            return self.pattern.match([name])[name]
        if self.types is not None and not any(word in name for word in self.types):
            return False
        return self.numbers is None or any(
            len(part) < 20 and part.isdecimal() and int(part) in self.numbers for part in name.split(".")
        )

    def __str__(self) -> str:
        if self.exact is not None:
            return f"the names {', '.join(sorted(self.exact))}"
        if self.pattern is not None:
            return f"names with a match of {self.pattern.pattern}"
        words = [] if self.types is None else [f"names with {' or '.join(self.types)}"]
        if self.numbers is not None:
            words.append(f"numbers {', '.join(spans(self.numbers))}")
        return " and ".join(words) or "all layers"


def spans(numbers: Iterable[int]) -> list[str]:
    """Write numbers as few ranges.

    Example::

        >>> spans([0, 1, 2, 5])
        ['0-2', '5']
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ["-".join(map(str, span)) for span in found]
