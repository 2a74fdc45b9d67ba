"""Medians, ratios taken round by round, goals, and how they are printed."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from benchmarks.harness import Outcome, Turn

__all__ = ["MEBIBYTES", "MILLISECONDS", "Goal", "Quantity", "show", "show_goals"]

Kind = Literal["speed", "cost"]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """What of a turn is shown, and in which unit."""

    unit: str
    of: Callable[[Turn], float]


MILLISECONDS = Quantity("ms a step", lambda turn: turn.seconds * 1e3)
MEBIBYTES = Quantity("MiB at peak", lambda turn: turn.peak_bytes / 2**20)


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A speed (reference / subject) of at least, or a cost (subject / reference) of at most, the limit."""

    subject: str
    reference: str
    kind: Kind
    limit: float

    def met_by(self, ratio: float) -> bool:
        # Judged as printed: 1.004 is 1.00.
        return round(ratio, 2) >= self.limit if self.kind == "speed" else round(ratio, 2) <= self.limit


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The median of the rounds and their middle half."""

    low: float
    median: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}..{self.high:.{digits}f})"


def ratio(subject: Outcome, reference: Outcome, kind: Kind, quantity: Quantity) -> Spread | None:
    """Compare two contenders within each round, so that a slow minute slows both."""
    pairs = [
        (quantity.of(mine), quantity.of(theirs)) for mine, theirs in zip(subject.turns, reference.turns, strict=False)
    ]
    if not pairs:
        return None
    return Spread.over([theirs / mine if kind == "speed" else mine / theirs for mine, theirs in pairs])


def show(
    title: str, outcomes: Sequence[Outcome], *, reference: str, kind: Kind, quantity: Quantity = MILLISECONDS
) -> bool:
    """Print one row a contender; return whether none of them crashed."""
    named = {outcome.contender.name: outcome for outcome in outcomes}
    width = max(len(name) for name in named)
    turns = max(len(outcome.turns) for outcome in outcomes)
    print(f"\n{title}")
    print(f"  {turns} rounds; median (lower..upper quartile); {kind} = {FORMULA[kind]}")
    print(f"  {'contender':{width}}  {quantity.unit:>28}  {kind} against {reference}")
    for name, outcome in named.items():
        failure = outcome.skipped or outcome.crashed
        if failure is not None or not outcome.turns:
            word = "skipped" if outcome.skipped else "CRASHED"
            print(f"  {name:{width}}  {word}: {failure}")
            continue
        spread = Spread.over([quantity.of(turn) for turn in outcome.turns])
        against = ratio(outcome, named[reference], kind, quantity)
        print(f"  {name:{width}}  {spread.text(1):>28}  {against.text(2) + ' x' if against else '-'}")
    return all(outcome.crashed is None for outcome in outcomes)


FORMULA: dict[Kind, str] = {
    "speed": "the reference's time / the contender's, more is better",
    "cost": "the contender's / the reference's, less is better",
}


def show_goals(outcomes: Sequence[Outcome], goals: Sequence[Goal], quantity: Quantity = MILLISECONDS) -> None:
    """Print each goal, what was measured, and whether that meets it."""
    named = {outcome.contender.name: outcome for outcome in outcomes}
    for goal in goals:
        sign = ">=" if goal.kind == "speed" else "<="
        aim = f"{goal.kind} of {goal.subject} {sign} {goal.limit:.2f} x {goal.reference}"
        measured = ratio(named[goal.subject], named[goal.reference], goal.kind, quantity)
        if measured is None:
            print(f"  goal: {aim}: not measured")
        else:
            verdict = "met" if goal.met_by(measured.median) else "NOT MET"
            print(f"  goal: {aim}: {measured.text(2)} {verdict}")
