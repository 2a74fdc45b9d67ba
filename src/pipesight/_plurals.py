"""Numbers and nouns in messages."""

from __future__ import annotations

__all__ = ["count_of", "plural"]


def plural(number: int, noun: str, several: str | None = None) -> str:
    """Return the noun, in the plural unless the number is 1; ``several`` is the plural if it is not formed with *s*.

    >>> plural(1, "rank"), plural(2, "rank"), plural(0, "micro-batch", "micro-batches")
    ('rank', 'ranks', 'micro-batches')
    """
    if number == 1:
        return noun
    return f"{noun}s" if several is None else several


def count_of(number: int, noun: str, several: str | None = None) -> str:
    """Return a number with its noun.

    >>> count_of(1, "step"), count_of(1234, "step")
    ('1 step', '1,234 steps')
    """
    return f"{number:,} {plural(number, noun, several)}"
