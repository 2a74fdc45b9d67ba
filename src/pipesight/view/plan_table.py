"""Plans as a table and notes, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from pipesight._formatting import size, time
from pipesight._plurals import count_of
from pipesight.analysis.plan_outcome import Outcome
from pipesight.plan.large_layers import LargeLayer
from pipesight.plan.plans import Plan
from pipesight.schedule.costs import SPLIT_COST
from pipesight.view.text_layout import broken, broken_code, columns, shown_width

__all__ = ["HEADINGS", "Row", "large_layer_note", "notes_on", "plan_text", "table_rows"]

SMALL = 0.5
"""Plans whose micro-batches have at most this share of the recorded samples get a note."""
FAR_OFF = 0.1
"""The error of the simulated recording above which there is a note."""
RECORDED, SIMULATED = "recorded", "simulated"
"""The first rows: the recorded schedule as measured, and as simulated."""
KEPT = "\xa0"
"""A space that no line ends at."""
HEADINGS = ("", "schedule", "checkpoint", "chunks", "balance", "step", "saves", "bubble", "memory")

Row: TypeAlias = tuple[str, ...]
"""A cell for each of `HEADINGS`."""


def plan_text(outcome: Outcome, *, all_plans: bool = False, width: int = 10_000, with_call: bool = True) -> str:
    """Write the plans as text, and ``with_call`` the code that runs the fastest.

    By default, only plans that are worth it are listed.
    """
    shown = outcome.plans if all_plans else outcome.worth_listing()
    lines = _fitted(table_rows(outcome, shown), width)
    sentences = []
    if any(not plan.proven for plan in shown):
        sentences.append("* another balance may be faster: the search stopped before it had ruled out all others")
    if len(shown) < len(outcome.plans):
        save = "" if outcome.baseline is None else "save nothing, or "
        sentences.append(
            f"{len(outcome.plans) - len(shown)} of {len(outcome.plans)} plans are not listed: they {save}need as "
            "much memory as a faster one, or nearly; --all shows all"
        )
    sentences += [f"note: {note}" for note in notes_on(outcome, shown)]
    # Of a run over ranks or of steps, all plans can be run, but for loops of other lengths on the CPU.
    plan = None
    if (advice := outcome.keep()) is not None:
        sentences += ["", advice]
    elif with_call and (plan := outcome.fastest_to_run()) is not None:
        sentences += ["", *([] if plan is outcome.plans[0] else [f"{_limit_of_engine(outcome)}; its best:"])]
    for sentence in sentences:
        lines += broken(sentence, width, indent="  ") or [""]
    if plan is not None:
        lines += broken_code(str(outcome.call(plan)), width)
    return "\n".join(lines)


def _limit_of_engine(outcome: Outcome) -> str:
    if outcome.in_steps:
        return "Pipeline on the CPU runs loops of two rounds only"
    engine = "a call of Pipeline" if outcome.costs.by_cuts else "GPipe"
    return f"Pipeline.step runs any of these, {engine} only gpipe"


def _fitted(rows: Sequence[Row], width: int) -> list[str]:
    """Lay the table out or, where it is too wide, what was recorded above it, or each plan in lines of its own."""
    known = [row for row in rows if row[0] in (RECORDED, SIMULATED)]
    above = [line for row in known for line in _stacked(row, width)]
    plans = [row[1:] for row in (HEADINGS, *rows[len(known) :])]
    for start, table in (([], [HEADINGS, *rows]), (above, plans)):
        for gap in (2, 1):
            lines = [*start, *columns(table, align="l" * len(table[0]), gap=gap)]
            if max(map(shown_width, lines)) <= width:
                return lines
    return [line for row in rows for line in _stacked(row, width)]


def _stacked(row: Row, width: int) -> list[str]:
    """Write a row in words: ``gpipe, never, chunks 4, balance 2 2, 5 ms, saves 3%, bubble 20%, memory 1 MiB``."""
    named = {"chunks", "balance", "saves", "bubble", "memory"}
    words = []
    for heading, cell in zip(HEADINGS[1:], row[1:], strict=True):
        if cell:
            word = f"{heading} {cell}" if heading in named else cell
            words.append(word if heading == "balance" else word.replace(" ", KEPT))
    first = f"{row[0]}: " if row[0] else "- "
    return [line.replace(KEPT, " ") for line in broken(", ".join(words), width, indent="    ", first=first)]


def table_rows(outcome: Outcome, plans: Iterable[Plan]) -> list[Row]:
    """Return a row for the recorded schedule as measured, one as simulated, and one for each plan."""
    found: list[Row] = []
    if (known := outcome.measured) is not None:
        what = (known.schedule_name, known.checkpoint, str(known.schedule.chunks), _balance(known.balance))
        found.append((RECORDED, *what, time(known.step_seconds * 1e6), "", f"{known.bubble:.1%}", ""))
        simulated = (time(known.predicted_seconds * 1e6), "", f"{known.predicted_bubble:.1%}")
        found.append((SIMULATED, *[""] * 4, *simulated, _memory(outcome, outcome.recorded_bytes)))
    for place, plan in enumerate(plans):
        setting = plan.setting
        name = plan.schedule_name + (f" x{setting.rounds}" if setting.rounds > 1 and not setting.in_v else "")
        what = (name, setting.checkpoint, str(setting.chunks), _balance(plan.balance))
        step = time(plan.step_seconds * 1e6) + ("" if plan.proven else " *")
        saved = "" if outcome.baseline is None else f"{1 - plan.step_seconds / outcome.baseline:.1%}"
        cells = (*what, step, saved, f"{plan.bubble:.1%}", _memory(outcome, plan.memory_bytes, plan))
        found.append(("" if place else "best", *cells))
    return found


def notes_on(outcome: Outcome, plans: Sequence[Plan]) -> list[str]:
    """Return the caveats of some plans."""
    found = []
    if (known := outcome.measured) is not None:
        if known.schedule.devices < known.devices:
            found.append("partitions of the run share devices; plans give each its own")
        crowd = max((plan.setting.partitions for plan in plans), default=0)
        if (processors := known.processors) is not None and crowd > max(processors, known.schedule.devices):
            what = "ranks" if known.facts.ranks is not None else "partitions"
            few = count_of(processors, "processor")
            found.append(f"plans with {crowd} {what} on {few} are optimistic: the run had fewer")
        if abs(known.error) > FAR_OFF:
            error = f"{known.error:+.1%}"
            found.append(f"the simulation of the recorded schedule is off by {error}; plans may be off by as much")
        recorded = known.schedule.chunks
        if small := sorted({plan.setting.chunks for plan in plans if plan.setting.chunks * SMALL >= recorded}):
            found.append(
                f"with {_listed(small)} chunks, micro-batches have at most half the recorded samples; the "
                "fixed cost of a task is estimated, so their savings are upper limits"
            )
    if known is None or not known.schedule.split.any():
        split = sorted({plan.schedule_name for plan in plans if plan.schedule.split.any()})
        if split:
            which = _listed(split, "and")
            found.append(
                f"what it costs to run backwards in two parts, as in {which}, was not measured; {SPLIT_COST:.0%} more "
                "is assumed"
            )
    if any(plan.setting.chunks == 1 and plan.setting.partitions > 1 for plan in plans):
        found.append("with chunks=1 there is no pipelining: partitions take turns")
    if (limit := outcome.limit) is not None and any(outcome.fits(plan) is False for plan in plans):
        who = "the machine, which all share," if limit.shared else "a device of the run"
        found.append(f"plans marked ! do not fit: {who} has {size(limit.bytes)}")
    if (large := outcome.too_large()) is not None:
        found.append(large_layer_note(large))
    return [*found, *outcome.costs.notes]


def large_layer_note(large: LargeLayer) -> str:
    """Say that a layer is too large for any cut to help, and what splitting it would give."""
    return (
        f"layer {large.name!r} takes {large.share:.0%} of the model's time, more than the {large.fair:.0%} of a "
        f"partition, so no cut balances the partitions; split into {large.parts} equal layers, the step would take "
        f"{time(large.step_seconds * 1e6)} ({large.gain:.0%} less)"
    )


def _listed(items: Sequence[object], word: str = "or") -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} {word} {last}" if most else last


def _memory(outcome: Outcome, needs: Sequence[float] | None, plan: Plan | None = None) -> str:
    if needs is None or not outcome.costs.sizes_known:
        return "?"
    return size(max(needs)) + (" !" if plan is not None and outcome.fits(plan) is False else "")


def _balance(balance: Sequence[int]) -> str:
    if len(balance) <= 12:
        return " ".join(map(str, balance)) or "?"
    return f"{len(balance)} of {min(balance)} to {max(balance)}"
