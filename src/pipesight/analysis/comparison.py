"""Two runs compared: what differs, and which loss explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipesight._formatting import signed_time
from pipesight.analysis.compared_layers import LayerChange, layer_changes, same_layers
from pipesight.analysis.report import Report
from pipesight.analysis.verdict import TITLES

__all__ = ["Comparison", "Difference", "compare"]

ALIKE = 0.01
"""The share of the first run's step by which two runs may differ and still count as alike."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A quantity in both runs."""

    first: float
    second: float

    @property
    def change(self) -> float:
        """The second less the first."""
        return self.second - self.first


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What differs between two runs. Times are microseconds: of steps the median, of their parts the mean."""

    first: Report
    second: Report
    text: str
    quantities: Mapping[str, Difference]
    parts: Mapping[str, Difference]
    layers: Sequence[LayerChange]
    """Of both runs, those that differ most first."""
    settings: Mapping[str, tuple[Any, Any]]
    """Settings that differ, as far as both runs record them: name, value in the first run, value in the second."""


def compare(first: Report, second: Report) -> Comparison:
    """Compare two runs, the second with the first.

    Raises:
        ValueError: One of them has no complete step.
    """
    for report in (first, second):
        if report.overall is None:
            raise ValueError(f"{report.path!r} has no complete step to compare")
    one, other = first.overall, second.overall
    assert one is not None
    assert other is not None
    quantities = {
        "step_time": Difference(one.time.median, other.time.median),
        "steps_per_second": Difference(one.steps_per_second, other.steps_per_second),
        "microbatches_per_second": Difference(one.microbatches_per_second, other.microbatches_per_second),
        "bubble": Difference(one.bubble, other.bubble),
        "bound": Difference(one.bound, other.bound),
        "recompute": Difference(one.recompute, other.recompute),
    }
    if one.samples_per_second is not None and other.samples_per_second is not None:
        quantities["samples_per_second"] = Difference(one.samples_per_second, other.samples_per_second)
    parts = {name: Difference(one.parts[name], other.parts[name]) for name in one.parts}
    text = _sentence(one.time.median, other.time.median, parts)
    if (same := same_layers(first, second)) is not None:
        quantities["same_layers"] = Difference(same.first, same.second)
        if (machine := same.sentence()) is not None:
            text = f"{text} {machine}"
    return Comparison(first, second, text, quantities, parts, layer_changes(first, second), _settings(first, second))


def _settings(first: Report, second: Report) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the pipelines that most mini-batches of each run went through."""
    one, other = _settings_of(first), _settings_of(second)
    known = [name for name in one if one[name] is not None and other.get(name) is not None]
    return {name: (one[name], other[name]) for name in known if one[name] != other[name]}


def _settings_of(report: Report) -> dict[str, Any]:
    if not report.pipelines:
        return {}
    pipeline = max(report.pipelines, key=lambda pipeline: pipeline.minibatches)
    facts = pipeline.facts
    devices = facts.devices and list(facts.devices)
    if devices and len({*devices}) == 1:  # one for each partition, and their number is another setting
        del devices[1:]
    return {
        "ranks": len(report.ranks),
        "replicas": pipeline.replicas,
        "partitions": pipeline.partitions,
        "balance": facts.balance and list(facts.balance),
        "devices": devices,
        "chunks": pipeline.chunks,
        "schedule": facts.schedule,
        "checkpoint": facts.checkpoint,
        "batch": facts.batch_size,
        "stats": _statistics_of(report),
    }


def _statistics_of(report: Report) -> str | None:
    """Return the configuration of the statistics that were measured, or ``"none"``; ``None`` if that is not known."""
    observed = report.description.get("observed")
    if not isinstance(observed, dict) or "stats" not in observed:
        return None
    return "none" if observed["stats"] is None else str(observed["stats"])


def _sentence(before: float, after: float, parts: Mapping[str, Difference]) -> str:
    change = after - before
    if abs(change) < ALIKE * before:
        largest = max(parts, key=lambda name: abs(parts[name].change))
        text = f"The median step takes the same time in both, to within {ALIKE:.0%}"
        if abs(parts[largest].change) < ALIKE * before:
            return f"{text}, spent in the same way."
        differs = f"{TITLES[largest]} ({signed_time(parts[largest].change)})"
        return f"{text}; the largest difference in the mean step is {differs}."
    text = f"The second run takes {abs(change) / before:.1%} {'more' if change > 0 else 'less'} time per step: "
    text += f"{signed_time(change)} in the median step."
    # Parts are those of the mean step, which a few long steps may dominate.
    mean = sum(part.change for part in parts.values())
    if abs(mean - change) <= 0.25 * abs(change):
        return f"{text} In the mean step, most of that is {_causes(change, parts)}."
    if abs(mean) < ALIKE * before:
        return f"{text} The mean step takes the same time: some steps took much longer than others."
    return f"{text} The mean step changed by {signed_time(mean)}, and most of that is {_causes(mean, parts)}."


def _causes(change: float, parts: Mapping[str, Difference]) -> str:
    """Name the parts that changed in the same direction as the step, the largest first, until most is explained."""
    causes = sorted((n for n in parts if parts[n].change * change > 0), key=lambda n: -abs(parts[n].change))
    named, sum_so_far = [], 0.0
    for name in causes[:3]:
        if abs(sum_so_far) >= 0.8 * abs(change) or abs(parts[name].change) < 0.05 * abs(change):
            break
        named.append(f"{TITLES[name]} ({signed_time(parts[name].change)})")
        sum_so_far += parts[name].change
    if not named:
        return "spread over all parts"
    return ", ".join(named[:-1]) + (" and " if len(named) > 1 else "") + named[-1]
