"""Plans as rows of text, for terminals and pages, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipesight._plurals import count_of
from pipesight.analysis.measured_costs import Measured
from pipesight.plan.plans import UNPIPELINED, WORTH, Plan, distributed_call
from pipesight.schedule.costs import Costs

__all__ = ["HEADINGS", "Outcome", "Row", "as_json", "best_of_each", "notes", "rows"]

SMALL = 0.5
"""Of the recorded samples of a micro-batch: plans that have no more than that are made for small ones."""
FAR_OFF = 0.1
"""How far the recorded schedule may be off when it is simulated, before it is worth a word."""
HEADINGS = ("", "schedule", "checkpoint", "chunks", "balance", "step", "saves", "bubble", "memory")


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What was planned: for which costs, from which run, and the plans, the fastest first."""

    costs: Costs
    plans: Sequence[Plan]
    measured: Measured | None = None
    recorded_bytes: tuple[float, ...] | None = None
    """What the recorded schedule needs on each device."""
    devices: str | None = None
    """What kind they are, such as ``cpu`` or ``cuda``."""
    memory: float = math.inf
    """Bytes that a device may hold at most."""

    @property
    def baseline(self) -> float | None:
        """The predicted step of the recorded schedule, which plans are compared with: both are simulated."""
        return None if self.measured is None else self.measured.predicted_seconds

    @property
    def knows_memory(self) -> bool:
        """Whether any size is known."""
        return any(layer.parameter_bytes or layer.kept_bytes for layer in self.costs.layers)

    def fastest_to_run(self) -> Plan | None:
        """Return the fastest plan that the engine of the run can run: `pipesight.GPipe`, or `DistributedPipeline`."""
        return next((plan for plan in self.plans if self.call(plan) is not None), None)

    def keep(self) -> str | None:
        """Return words that say so if what was recorded is best kept; nothing if a plan to run saves more than 1%.

        What has other devices than plans have, or does not fit into their memory, cannot be kept.
        """
        known, best = self.measured, self.fastest_to_run()
        same = known is not None and any(plan.setting.partitions == known.devices for plan in self.plans)
        if self.baseline is None or not same or max(self.recorded_bytes or (0.0,)) > self.memory:
            return None
        least = self.baseline * (1 - WORTH)
        if best is not None and best.step_seconds < least:
            return None
        which = " that the run's engine can run" if self.plans[0].step_seconds < least else ""
        return f"no plan{which} saves more than {WORTH:.0%}: keep the current settings"

    def call(self, plan: Plan) -> str | None:
        """Return the code that runs a plan, where the engine of the run can."""
        n = plan.setting.partitions
        if self.measured is not None and self.measured.facts.ranks is not None:
            return distributed_call(plan)
        if self.devices is None:
            return plan.call()
        return plan.call([self.devices if self.devices == "cpu" else f"{self.devices}:{j}" for j in range(n)])


Row: TypeAlias = tuple[str, ...]
"""A cell for each of `HEADINGS`."""


def best_of_each(plans: Iterable[Plan]) -> list[Plan]:
    """Return the fastest plan of each schedule, checkpoint mode and number of partitions."""
    best: dict[tuple[str, str, int], Plan] = {}
    for plan in plans:
        best.setdefault((plan.setting.schedule, plan.setting.checkpoint, plan.setting.partitions), plan)
    return list(best.values())


def rows(
    outcome: Outcome, plans: Iterable[Plan], *, seconds: Callable[[float], str], size: Callable[[float], str]
) -> list[Row]:
    """Return a row for the recorded schedule as measured, one as predicted, and one for each plan."""
    found: list[Row] = []
    if (known := outcome.measured) is not None:
        what = (known.schedule_name, known.checkpoint, str(known.schedule.chunks), _balance(known.balance))
        found.append(("recorded", *what, seconds(known.step_seconds), "", f"{known.bubble:.1%}", ""))
        error = known.predicted_seconds / known.step_seconds - 1
        told = (seconds(known.predicted_seconds), f"{error:+.1%} off", f"{known.predicted_bubble:.1%}")
        found.append(("  simulated", *[""] * 4, *told, _memory(outcome, outcome.recorded_bytes, size)))
    for place, plan in enumerate(plans):
        saved = "" if outcome.baseline is None else f"{1 - plan.step_seconds / outcome.baseline:.1%}"
        name = plan.setting.schedule + (f" x{plan.setting.rounds}" if plan.setting.rounds > 1 else "")
        what = (name, plan.setting.checkpoint, str(plan.setting.chunks), _balance(plan.balance))
        time = seconds(plan.step_seconds) + ("" if plan.proven else " *")
        found.append(
            (
                "best" if not place else "",
                *what,
                time,
                saved,
                f"{plan.bubble:.1%}",
                _memory(outcome, plan.memory_bytes, size),
            )
        )
    return found


def notes(outcome: Outcome, plans: Sequence[Plan]) -> list[str]:
    """Return what to know about some plans."""
    found = []
    if (known := outcome.measured) is not None:
        if known.schedule.devices < known.devices:
            found.append("partitions of the run share devices; plans give each its own")
        crowd = max((plan.setting.partitions for plan in plans), default=0)
        if (processors := known.processors) is not None and crowd > max(processors, known.schedule.devices):
            what = "ranks" if known.facts.ranks is not None else "partitions"
            few = count_of(processors, "processor")
            found.append(f"plans with {crowd} {what} on {few} are optimistic: the run had fewer")
        error = known.predicted_seconds / known.step_seconds - 1
        if abs(error) > FAR_OFF:
            found.append(f"the simulation of the recorded schedule is off by {error:+.1%}; plans may be off by as much")
        recorded = known.schedule.chunks
        if small := sorted({plan.setting.chunks for plan in plans if plan.setting.chunks * SMALL >= recorded}):
            found.append(
                f"with {_listed(small)} chunks, micro-batches have at most half the recorded samples; the "
                "fixed cost of a task is estimated, so their savings are upper limits"
            )
    if any(plan.setting.chunks == 1 and plan.setting.partitions > 1 for plan in plans):
        found.append(f"chunks=1 is {UNPIPELINED}, so partitions take turns")
    return [*found, *outcome.costs.notes]


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _memory(outcome: Outcome, needs: Sequence[float] | None, size: Callable[[float], str]) -> str:
    return size(max(needs)) if needs is not None and outcome.knows_memory else "?"


def _balance(balance: Sequence[int]) -> str:
    if len(balance) <= 12:
        return " ".join(map(str, balance)) or "?"
    return f"{len(balance)} of {min(balance)} to {max(balance)}"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return all of it for machines. Times are in seconds, sizes in bytes."""
    found: dict[str, Any] = {"format": "pipesight-plan", "format_version": 1, "notes": notes(outcome, outcome.plans)}
    if (known := outcome.measured) is not None:
        found["recorded"] = {
            "schedule": known.schedule_name,
            "partitions": known.schedule.stages,
            "devices": known.schedule.devices,
            "chunks": known.schedule.chunks,
            "checkpoint": known.checkpoint,
            "balance": list(known.balance),
            "steps": known.steps,
            "step_seconds": known.step_seconds,
            "bubble": known.bubble,
            "predicted_step_seconds": known.predicted_seconds,
            "predicted_bubble": known.predicted_bubble,
            "memory_bytes": _bytes(outcome, outcome.recorded_bytes),
        }
    found["plans"] = [_plan(outcome, plan) for plan in outcome.plans]
    found["keep"] = outcome.keep() is not None
    return found


def _plan(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    setting = plan.setting
    return {
        "schedule": setting.schedule,
        "partitions": setting.partitions,
        "rounds": setting.rounds,
        "chunks": setting.chunks,
        "checkpoint": setting.checkpoint,
        "balance": list(plan.balance),
        "step_seconds": plan.step_seconds,
        "window_seconds": plan.window_seconds,
        "bubble": plan.bubble,
        "memory_bytes": _bytes(outcome, plan.memory_bytes),
        "proven": plan.proven,
        "bound_seconds": plan.bound_seconds,
        "call": outcome.call(plan),
    }


def _bytes(outcome: Outcome, needs: Sequence[float] | None) -> list[int] | None:
    if needs is None or not outcome.knows_memory:
        return None
    return [math.ceil(size) for size in needs]
