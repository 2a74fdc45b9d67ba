"""The arithmetic of comparing a rank's clock with that of rank 0.

Each rank asks rank 0 for the time repeatedly, and keeps the answer that came fastest::

    rank 1   ── sent ──────────────── received ──     rank 0 read its clock somewhere in between: halfway, give or
    rank 0            ── its clock ──                 take half of the time that it took

Two such measurements, at the start and at the end, give an offset and a drift. The error is that of the straight line
through both, and more if another measurement shows that the clocks did not drift evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Correction", "Measurement", "correction_from", "measure"]

ROUNDS = 32
"""How often a rank asks in one measurement."""
UNKNOWN_DRIFT = 1e-4
"""The most that clocks are assumed to drift apart where it was not measured: 100 microseconds per second."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """How far the clock of rank 0 is ahead when ours shows ``at``, in nanoseconds."""

    at: int
    ahead: int
    error: int


@dataclass(frozen=True, slots=True)
class Correction:
    """What to add to the times of a rank: ``ahead`` nanoseconds, plus ``drift`` for each after ``since``."""

    since: int
    ahead: int
    drift: float
    error: int
    """How far corrected times may still be off, in nanoseconds."""

    def apply(self, moment: int) -> int:
        """Return the time by the clock of rank 0."""
        return moment + self.ahead + round((moment - self.since) * self.drift)

    def as_json(self) -> dict[str, Any]:
        """Return what ``run.json`` says."""
        return {
            "error_ns": self.error,
            "offset_correction_ns": self.ahead,
            "drift": self.drift,
            "drift_since_ns": self.since,
        }


def measure(ask: Callable[[], int], clock: Callable[[], int], *, rounds: int = ROUNDS) -> Measurement:
    """Ask for the time of rank 0 several times, and keep the answer that came fastest."""
    best: Measurement | None = None
    for _ in range(rounds):
        sent = clock()
        theirs = ask()
        received = clock()
        error = (received - sent + 1) // 2
        if best is None or error < best.error:
            at = (sent + received) // 2
            best = Measurement(at, theirs - at, error)
    if best is None:
        raise ValueError(f"rounds must be a positive integer (rounds: {rounds})")
    return best


def correction_from(measurements: Sequence[Measurement], *, begin: int, end: int) -> Correction:
    """Fit a line through the best measurement of the first half of the time, and the best of the second."""
    middle = (measurements[0].at + measurements[-1].at) // 2
    one = min((m for m in measurements if m.at <= middle), key=lambda m: m.error)
    others = [m for m in measurements if m.at > middle]
    moments = (begin, end, one.at)
    if not others:
        furthest = max(abs(moment - one.at) for moment in moments)
        return Correction(one.at, one.ahead, 0.0, one.error + round(UNKNOWN_DRIFT * furthest))
    two = min(others, key=lambda m: m.error)
    between = two.at - one.at

    def error_at(moment: int) -> float:
        weight = (moment - one.at) / between
        return abs(1 - weight) * one.error + abs(weight) * two.error

    drift = (two.ahead - one.ahead) / between
    error = max(error_at(moment) for moment in (*moments, two.at))
    for other in measurements:
        off = abs(other.ahead - one.ahead - (other.at - one.at) * drift)
        if off > error_at(other.at) + other.error:
            error = max(error, off + other.error)
    return Correction(one.at, one.ahead, drift, round(error) + 1)
