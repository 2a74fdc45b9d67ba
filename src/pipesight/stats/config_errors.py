"""The mistakes in a configuration: where each is, what is wrong, and the closest valid name."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any, Protocol

from pipesight._plurals import count_of

__all__ = ["ConfigError", "Document", "Mistakes", "Path", "dotted", "nearest", "placed", "shown"]

Path = tuple[Any, ...]
"""The keys and list indices that lead to a value: ``("main", "LogTensorStats", "tensors_struct", 0, "freq")``."""

LONGEST_VALUE = 60
MOST_WORDS = 16
MOST_MISTAKES = 100

_SHORT = reprlib.Repr()  # aliases of aliases may make a value that is endless when written
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist = 3, 6, 8
_SHORT.maxstring = _SHORT.maxother = LONGEST_VALUE


class ConfigError(ValueError):
    """A configuration has mistakes; the message lists all of them.

    Attributes:
        source: The path of the file; empty for a dict.
        mistakes: One line each, ``FILE:LINE: section.feature.key: rule (value)``.
    """

    def __init__(self, source: str, mistakes: Iterable[str]) -> None:
        self.source = source
        self.mistakes = tuple(mistakes)
        super().__init__(source, self.mistakes)

    def __str__(self) -> str:
        count = count_of(len(self.mistakes), "mistake")
        return "\n  ".join([f"{count} in the configuration{' ' * bool(self.source)}{self.source}:", *self.mistakes])


class Document(Protocol):
    """A configuration as read: plain values, and where they stand. A dict has no source and no lines."""

    source: str
    value: Any
    flaws: list[tuple[int, str]]

    def line(self, path: Path) -> int | None:
        """Return the line of ``path``, or of the nearest thing around it that there is."""


class Mistakes:
    """What is wrong with one document, in the order of its lines."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._found: dict[tuple[int, str], None] = {}  # a rule that several tensors share is told once

    def __bool__(self) -> bool:
        return bool(self._found)

    def place(self, path: Path) -> tuple[str, int | None]:
        """Return the source, and the line of ``path`` in it."""
        return self._document.source, self._document.line(path)

    def add(self, path: Path, text: str) -> None:
        """Record a mistake at ``path``."""
        self.at_line(self._document.line(path), f"{dotted(path)}: {text}" if path else text)

    def at_line(self, line: int | None, text: str) -> None:
        """Record a mistake at a line, which may be unknown.

        Raises:
            ConfigError: There are so many that nobody would read more.
        """
        self._found[line or 0, placed(self._document.source, line, text)] = None
        if len(self._found) >= MOST_MISTAKES:
            raise self.error()

    def error(self) -> ConfigError:
        """Return all that was recorded as one error."""
        found = sorted(self._found, key=lambda mistake: mistake[0])
        return ConfigError(self._document.source, [text for _, text in found])


def placed(source: str, line: int | None, text: str) -> str:
    """Put the file and the line, where they are known, before a message."""
    return f"{source}:{line}: {text}" if source and line else f"{source}: {text}" if source else text


def dotted(path: Path) -> str:
    """Write a path as ``main.LogTensorStats.tensors_struct[0].freq``."""
    text = ""
    for part in path:
        if isinstance(part, int) and not isinstance(part, bool):
            text += f"[{shown(part)}]"
        else:
            text += f".{part}" if text else f"{part}"
    return text


def shown(value: object) -> str:
    """Write a value in at most one line."""
    try:
        text = " ".join(_SHORT.repr(value).split())
    except ValueError:  # a number with so many digits that Python does not write it
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def nearest(word: object, words: Iterable[str]) -> str:
    """Return the end of a message that says which of ``words`` was meant, or which there are.

    Example::

        >>> nearest("maen", ["min", "max", "mean"])
        "; did you mean 'mean'?"
    """
    known = sorted({*words})
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1) if isinstance(word, str) else []
    if found:
        return f"; did you mean {by_lower[found[0]]!r}?"
    if not known:
        return ""
    more = f" and {len(known) - MOST_WORDS} more" if len(known) > MOST_WORDS else ""
    return f"; known: {', '.join(known[:MOST_WORDS])}{more}"
