"""Numbers with units, as people read them: times, sizes, shares, rates."""

from __future__ import annotations

import math

__all__ = ["percent", "rate", "rough_percent", "signed_time", "size", "time"]


def time(microseconds: float) -> str:
    """Write a time with three digits or so.

    >>> time(12345), time(12.3), time(4_560_000)
    ('12.3 ms', '12.3 µs', '4.56 s')
    """
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(microseconds) >= size * 0.9995:
            return f"{_three(microseconds / size)} {unit}"
    return f"{_three(microseconds)} µs"


def size(count: float, *, round_up: bool = False) -> str:
    """Write bytes with three digits or so; rounded up, it is a limit that is large enough.

    >>> size(65536), size(100), size(840705, round_up=True)
    ('64.0 KiB', '100 B', '822 KiB')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power * 0.9995:
            return f"{_three(count / 1024**power, round_up=round_up)} {unit}"
    return f"{math.ceil(round(count, 6)) if round_up else count:.0f} B"


def _three(value: float, *, round_up: bool = False) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    if round_up:
        value = math.ceil(round(value * 10**digits, 6)) / 10**digits
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Write a share to a tenth of a percent; ``-`` for nothing, as in a table.

    >>> percent(0.4286), percent(0.0)
    ('42.9%', '-')
    """
    return f"{share:.1%}" if abs(share) >= 0.0005 else "-"


def rough_percent(share: float) -> str:
    """Write a share in a sentence.

    >>> rough_percent(0.4286), rough_percent(0.0286)
    ('43%', '2.9%')
    """
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def rate(per_second: float) -> str:
    """Write a number per second with three digits or so.

    >>> rate(1234.5), rate(2.345)
    ('1,234', '2.35')
    """
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def signed_time(change: float) -> str:
    """Write a difference of times, with its sign.

    >>> signed_time(-12345)
    '-12.3 ms'
    """
    return f"{'+' if change > 0 else '-'}{time(abs(change))}"
