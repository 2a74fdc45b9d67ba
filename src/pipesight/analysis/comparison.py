"""Two runs compared, of pipelines or of any programs: what differs, and which part of the step explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipesight._formatting import signed_time
from pipesight.analysis.compared_curves import ComparedCurve, compared_curves
from pipesight.analysis.compared_layers import LayerChange, layer_changes, same_layers
from pipesight.analysis.memory import PARTS, MemoryReport
from pipesight.analysis.program_advice import facts_about
from pipesight.analysis.program_time import part_title
from pipesight.analysis.report import Report
from pipesight.analysis.step_times import Summary
from pipesight.analysis.verdict import TITLES

__all__ = ["ALLOCATED", "PEAK", "Comparison", "Difference", "compare", "title_of"]

PEAK, ALLOCATED = "peak", "allocated"
"""Of the fullest device: what was counted at the ends of tasks, and what a GPU's allocator gave out at any time."""
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
    memory: Mapping[str, Difference]
    """Peak bytes: of the fullest device, what that is made of, and of devices that both runs have."""
    layers: Sequence[LayerChange]
    """Of both runs, those that differ most first."""
    settings: Mapping[str, tuple[Any, Any]]
    """Settings that differ, as far as both runs record them: name, value in the first run, value in the second."""
    curves: Sequence[ComparedCurve] = ()
    """Step times and counters of both runs over steps."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """What is compared of a run's steps."""

    time: Summary
    quantities: Mapping[str, float]
    parts: Mapping[str, float]


def title_of(part: str) -> str:
    """Return what a part of a step is called, be it a pipeline's or another program's."""
    return TITLES[part] if part in TITLES else part_title(part)


def compare(first: Report, second: Report) -> Comparison:
    """Compare two runs, the second with the first; ``ValueError`` if one has no complete step."""
    one, other = _steps_of(first), _steps_of(second)
    names = [name for name in one.quantities if name in other.quantities]
    quantities = {name: Difference(one.quantities[name], other.quantities[name]) for name in names}
    # A part that one of them does not have takes no time there; of a training log, none is known.
    both = dict.fromkeys([*one.parts, *other.parts] if one.parts and other.parts else [])
    parts = {name: Difference(one.parts.get(name, 0.0), other.parts.get(name, 0.0)) for name in both}
    text = _sentence(one.time.median, other.time.median, parts)
    settings = _settings(first, second)
    if "batch" in settings:
        before, after = settings["batch"]
        text = f"{text} Steps have {after} samples instead of {before}."
    if (same := same_layers(first, second)) is not None:
        quantities["same_layers"] = Difference(same.first, same.second)
        if (machine := same.sentence()) is not None:
            text = f"{text} {machine}"
    return Comparison(
        first,
        second,
        text,
        quantities,
        parts,
        _memory(first.memory, second.memory),
        layer_changes(first, second),
        settings,
        compared_curves([first, second]),
    )


def _steps_of(report: Report) -> _Steps:
    found: dict[str, float | None]
    if (overall := report.overall) is not None:
        found = {
            "step_time": overall.time.median,
            "steps_per_second": overall.steps_per_second,
            "microbatches_per_second": overall.microbatches_per_second,
            "bubble": overall.bubble,
            "bound": overall.bound,
            "recompute": overall.recompute,
            "samples_per_second": overall.samples_per_second,
        }
        time, parts = overall.time, overall.parts
    elif (program := report.program) is not None:
        found = {
            "step_time": program.time.median,
            "steps_per_second": program.count / program.elapsed * 1e6,
            "samples_per_second": program.samples_per_second,
        }
        time, parts = program.time, program.parts
    elif (logged := report.logged) is not None:
        found = {
            "step_time": logged.time.median,
            "steps_per_second": 1e6 / logged.time.mean,
            "samples_per_second": logged.samples_per_second,
        }
        time, parts = logged.time, {}
    else:
        raise ValueError(f"{report.path!r} has no complete step to compare")
    return _Steps(time, {name: value for name, value in found.items() if value is not None}, parts)


def _memory(first: MemoryReport | None, second: MemoryReport | None) -> dict[str, Difference]:
    if first is None or second is None or not first.devices or not second.devices:
        return {}
    one, other = (max(found.devices, key=lambda entry: entry.peak) for found in (first, second))
    found = {PEAK: Difference(one.peak, other.peak)}
    found |= {part: Difference(one.parts[part], other.parts[part]) for part in PARTS}
    if one.allocator_peak is not None and other.allocator_peak is not None:
        found[ALLOCATED] = Difference(one.allocator_peak, other.allocator_peak)
    devices = [{f"rank {e.rank}, {e.device}": e.peak for e in memory.devices} for memory in (first, second)]
    both = [name for name in devices[0] if name in devices[1]]
    if len(both) > 1:
        found |= {name: Difference(devices[0][name], devices[1][name]) for name in both}
    return found


def _settings(first: Report, second: Report) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the pipelines that most mini-batches of each run went through."""
    one, other = _settings_of(first), _settings_of(second)
    known = [name for name in one if one[name] is not None and other.get(name) is not None]
    return {name: (one[name], other[name]) for name in known if one[name] != other[name]}


def _settings_of(report: Report) -> dict[str, Any]:
    if not report.pipelines:
        return _settings_of_program(report)
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


def _settings_of_program(report: Report) -> dict[str, Any]:
    loaders, optimizers = (facts_about(report.description, what) for what in ("loaders", "optimizers"))
    loader, optimizer = (facts[0] if facts else {} for facts in (loaders, optimizers))
    return {
        "ranks": len(report.ranks),
        "batch": loader.get("batch_size"),
        "workers of the loader": loader.get("num_workers"),
        "optimizer": optimizer.get("class"),
        "fused": bool(optimizer.get("fused")) if optimizer else None,
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
    if abs(change) < ALIKE * before and not parts:
        return f"The median step takes the same time in both, to within {ALIKE:.0%}."
    if abs(change) < ALIKE * before:
        largest = max(parts, key=lambda name: abs(parts[name].change))
        text = f"The median step takes the same time in both, to within {ALIKE:.0%}"
        if abs(parts[largest].change) < ALIKE * before:
            return f"{text}, spent in the same way."
        differs = f"{title_of(largest)} ({signed_time(parts[largest].change)})"
        return f"{text}; the largest difference in the mean step is {differs}."
    text = f"The second run takes {abs(change) / before:.1%} {'more' if change > 0 else 'less'} time per step: "
    text += f"{signed_time(change)} in the median step."
    if not parts:
        return text
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
        named.append(f"{title_of(name)} ({signed_time(parts[name].change)})")
        sum_so_far += parts[name].change
    if not named:
        return "spread over all parts"
    return ", ".join(named[:-1]) + (" and " if len(named) > 1 else "") + named[-1]
