"""Sizes, times and bandwidths as people write them: 16GiB, 10us, 25GB/s."""

from __future__ import annotations

import argparse
import re

__all__ = ["bandwidth", "quota", "seconds", "size"]

_SIZES = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power for power, letter in enumerate("KMGT", 1) for i in ("", "i")
}
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "µs": 1_000_000, "ns": 1_000_000_000}
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-zµ/]*)")


def size(text: str) -> float:
    """Return bytes; a letter alone counts by 1024.

    >>> size("16GiB"), size("16G"), size("16GB")
    (17179869184.0, 17179869184.0, 16000000000.0)
    """
    letters = {letter.lower(): 1024**power for power, letter in enumerate("KMGT", 1)}
    units = letters | {unit.lower(): value for unit, value in _SIZES.items()}
    return _value(text, units, "a size, such as 16GiB, 16G or 800MB")


def quota(text: str) -> int | None:
    """Return the bytes of ``--max-bytes``; ``None`` for 0, which is no limit.

    >>> quota("500M"), quota("2GiB"), quota("0")
    (524288000, 2147483648, None)

    Raises:
        ValueError: It is not a size.
    """
    try:
        return int(size(text)) or None
    except argparse.ArgumentTypeError:
        raise ValueError(f"--max-bytes must be a size such as 500M or 2GiB (--max-bytes: {text!r})") from None


def bandwidth(text: str) -> float:
    """Return bytes per second; bits, with a small b, are divided by 8.

    >>> bandwidth("25GB/s"), bandwidth("100Gb/s")
    (25000000000.0, 12500000000.0)
    """
    what = "a bandwidth, such as 25GB/s or 100Gb/s"
    amount, slash, unit = text.strip().rpartition("/")
    if not slash or unit != "s":
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    bits = amount.endswith("b") and not amount.endswith("ib")
    value = _value(amount, {name.lower(): value for name, value in _SIZES.items() if name}, what)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value / 8 if bits else value


def seconds(text: str) -> float:
    """Return seconds.

    >>> seconds("10us")
    1e-05
    """
    number, per_second = _split(text, _PER_SECOND, "a time, such as 10us or 0.5ms")
    return number / per_second


def _value(text: str, units: dict[str, int], what: str) -> float:
    number, unit = _split(text, units, what)
    return number * unit


def _split(text: str, units: dict[str, int], what: str) -> tuple[float, int]:
    found = _NUMBER.fullmatch(text.strip())
    unit = found["unit"].lower() if found else ""
    if found is None or unit not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return float(found["number"]), units[unit]
