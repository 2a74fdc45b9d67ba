"""Medians, ratios taken round by round, goals: printed as they are found, and kept for the page of results."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from benchmarks.harness import Outcome, Turn

__all__ = [
    "MEBIBYTES",
    "MILLISECONDS",
    "Cell",
    "Goal",
    "Quantity",
    "Spread",
    "Table",
    "publish",
    "show",
    "show_goals",
    "show_limit",
    "take_tables",
    "text",
]

Kind = Literal["speed", "cost"]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """What of a turn is shown, and in which unit."""

    unit: str
    of: Callable[[Turn], float]


MILLISECONDS = Quantity("ms per step", lambda turn: turn.seconds * 1e3)
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

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}..{self.high:,.{digits}f})"


Cell = Spread | float | int | str | None


@dataclasses.dataclass(slots=True)
class Table:
    """What one comparison found."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    goals: list[list[Cell]] = dataclasses.field(default_factory=list)
    """What is compared, the ratio that was measured, the limit, whether it was met."""

    def lines(self) -> list[str]:
        """Return the table as a terminal shows it."""
        lines = ["", self.title] + ([f"  {self.note}"] if self.note else [])
        return lines + _aligned([self.columns, *([text(cell) for cell in row] for row in self.rows)])

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Table":
        read = {key: [[_cell(cell) for cell in row] for row in found[key]] for key in ("rows", "goals")}
        return cls(title=found["title"], columns=list(found["columns"]), note=found["note"], **read)


def text(cell: Cell) -> str:
    """Return a cell as a reader sees it, in the terminal and on the page."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.{0 if cell >= 100 else 1 if cell >= 10 else 2}f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _cell(found: Any) -> Cell:
    cell: Cell = Spread(**found) if isinstance(found, dict) else found
    return cell


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows of texts; a row with fewer cells says why there are no more."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return [
        "  "
        + f"{row[0]:{widths[0]}}"
        + "".join(f"  {one:>{width}}" for one, width in zip(row[1:], widths[1:], strict=False))
        for row in rows
    ]


_kept: list[Table] = []


def publish(table: Table) -> None:
    """Print a table, and keep it for `take_tables`."""
    _kept.append(table)
    print("\n".join(table.lines()), flush=True)


def take_tables() -> list[Table]:
    """Return the tables that were published since the last call."""
    taken = _kept[:]
    _kept.clear()
    return taken


def ratio(subject: Outcome, reference: Outcome, kind: Kind, quantity: Quantity) -> Spread | None:
    """Compare two contenders within each round, so that a slow minute slows both."""
    pairs = [
        (quantity.of(mine), quantity.of(theirs)) for mine, theirs in zip(subject.turns, reference.turns, strict=False)
    ]
    if not pairs:
        return None
    return Spread.over([theirs / mine if kind == "speed" else mine / theirs for mine, theirs in pairs])


def show(
    title: str,
    outcomes: Sequence[Outcome],
    *,
    reference: str,
    kind: Kind,
    quantity: Quantity = MILLISECONDS,
    note: str = "",
) -> bool:
    """Publish one row per contender; return whether none of them crashed."""
    named = {outcome.contender.name: outcome for outcome in outcomes}
    rows: list[list[Cell]] = []
    for name, outcome in named.items():
        failure = outcome.skipped or outcome.crashed
        if failure is not None or not outcome.turns:
            rows.append([name, f"{'skipped' if outcome.skipped else 'CRASHED'}: {failure}"])
            continue
        spread = Spread.over([quantity.of(turn) for turn in outcome.turns])
        rows.append([name, spread, ratio(outcome, named[reference], kind, quantity)])
    turns = max(len(outcome.turns) for outcome in outcomes)
    notes = [f"{turns} rounds. {kind.capitalize()} is {FORMULA[kind]}.", note]
    publish(
        Table(title, ["contender", quantity.unit, f"{kind} against {reference}"], rows, " ".join(filter(None, notes)))
    )
    return all(outcome.crashed is None for outcome in outcomes)


FORMULA: dict[Kind, str] = {
    "speed": "the reference's time divided by the contender's: more is better",
    "cost": "the contender's divided by the reference's: less is better",
}


def show_goals(outcomes: Sequence[Outcome], goals: Sequence[Goal], quantity: Quantity = MILLISECONDS) -> None:
    """Print each goal, what was measured, and whether that meets it; keep them with the last table."""
    named = {outcome.contender.name: outcome for outcome in outcomes}
    for goal in goals:
        measured = ratio(named[goal.subject], named[goal.reference], goal.kind, quantity)
        aim = f"{goal.kind} of {goal.subject} against {goal.reference}"
        limit = f"{'at least' if goal.kind == 'speed' else 'at most'} {goal.limit:.2f}"
        verdict = "not measured" if measured is None else "met" if goal.met_by(measured.median) else "NOT MET"
        _kept[-1].goals.append([aim, measured, limit, verdict])
        print(f"  goal: {aim}: {limit}: {text(measured)} {verdict}", flush=True)


def show_limit(what: str, measured: float, limit: float, *, met: bool, least: bool = False) -> None:
    """The same for a figure that must not be above a limit or, with ``least``, not below it."""
    verdict, bound = "met" if met else "NOT MET", f"at {'least' if least else 'most'} {text(limit)}"
    _kept[-1].goals.append([what, measured, bound, verdict])
    print(f"  goal: {what}: {bound}: {text(measured)} {verdict}", flush=True)
