"""The layers of two runs: which of them changed, and whether those with the same work show a slower machine.

If all layers that did the same work took longer in one run, it was the machine, not the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesight.analysis.described_pipelines import DescribedLayer
from pipesight.analysis.layer_times import LayerReport
from pipesight.analysis.report import Report

__all__ = ["CHANGED", "LayerChange", "SameLayers", "layer_changes", "same_layers"]

CHANGED = 0.05
"""The share of its time by which a layer must differ to count as changed."""
WORTH = 0.001
"""The share of the first run's step by which it must differ, too."""
NOTICEABLE = 0.03
"""How much all layers together must differ before the machine is named."""
AGREEING = 0.01
"""How much each of them must differ, in the same direction."""
SMALL = 0.01
"""Layers with a smaller share of the time are ignored: their times are mostly noise."""


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer in two runs: microseconds in the mean step, all its micro-batches together; nothing where it is not."""

    name: str
    partitions: tuple[int | None, int | None]
    first: float | None
    second: float | None
    changed: bool
    """Whether only one run has it, or it differs by more than noise."""

    @property
    def change(self) -> float:
        """The second less the first."""
        return (self.second or 0.0) - (self.first or 0.0)


def layer_changes(first: Report, second: Report) -> list[LayerChange]:
    """Return the layers of both runs, those that differ most first."""
    before, after = _times(first), _times(second)
    whole = first.overall or first.program
    step = whole.time.mean if whole is not None else 0.0
    found = []
    for name in {**before, **after}:
        (j, a), (k, b) = before.get(name, (None, None)), after.get(name, (None, None))
        differs = abs((b or 0.0) - (a or 0.0)) >= max(CHANGED * max(a or 0.0, b or 0.0), WORTH * step)
        found.append(LayerChange(name, (j, k), a, b, changed=a is None or b is None or differs))
    return sorted(found, key=lambda layer: (not layer.changed, -abs(layer.change)))


def _times(report: Report) -> dict[str, tuple[int | None, float | None]]:
    """Return the partition of each layer, and what it takes in the mean step of a replica; of a program, modules."""
    found: dict[str, tuple[int | None, float | None]] = {}
    for module in report.program.modules.modules if report.program is not None else ():
        found[module.name] = None, (found.get(module.name, (None, 0.0))[1] or 0.0) + module.total
    if not report.counted.any():
        return found
    often = float(report.steps.microbatches[report.counted].mean())
    for layer in report.layers:
        partition, time = found.get(layer.name, (layer.partition, 0.0))
        found[layer.name] = partition, (time or 0.0) + layer.cost * often
    return found


@dataclass(frozen=True, slots=True)
class SameLayers:
    """What one micro-batch takes in layers whose work is the same in both runs, in microseconds."""

    names: tuple[str, ...]
    first: float
    second: float
    agree: bool
    """Whether all of them differ in the same direction."""
    sizes_known: bool
    """Whether micro-batches are known to be of one size."""

    def sentence(self) -> str | None:
        """Say that the machine was faster or slower, if it seems so."""
        change = self.second / self.first - 1
        if not self.agree or abs(change) < NOTICEABLE:
            return None
        took, was = ("more time", "slower or busier") if change > 0 else ("less time", "faster or less busy")
        otherwise = "" if self.sizes_known else ", or the micro-batches differ"
        return (
            f"The same {len(self.names)} layers took {abs(change):.0%} {took} per micro-batch in the second run: the "
            f"machine itself was {was}{otherwise}, so this is not due to the balance or the schedule."
        )


def same_layers(first: Report, second: Report) -> SameLayers | None:
    """Return the layers that did the same work in both runs, if there are two of them at least.

    These have the same name, class and parameters, outputs of one size a sample, and micro-batches of as many samples.
    Recomputation does not count: it depends on the settings. Where another number of partitions ran beside each other,
    layers may share a device with others than before.
    """
    if len({layer.partition for layer in first.layers}) != len({layer.partition for layer in second.layers}):
        return None
    sizes = _samples(first), _samples(second)
    if sizes[0] != sizes[1]:
        return None
    facts = _facts(first), _facts(second)
    others = {layer.name: layer for layer in second.layers}
    pairs = [
        (layer, other)
        for layer in first.layers
        if (other := others.get(layer.name)) is not None
        and _work(facts[0].get(layer.name), first) == _work(facts[1].get(layer.name), second)
        and [runs > 0 for runs in layer.runs[::2]] == [runs > 0 for runs in other.runs[::2]]
        and min(_time(layer), _time(other)) > 0
    ]
    if len(pairs) < 2:
        return None
    totals = sum(_time(layer) for layer, _ in pairs), sum(_time(other) for _, other in pairs)
    asked = [_time(b) / _time(a) for a, b in pairs if _time(a) >= SMALL * totals[0]]
    return SameLayers(
        names=tuple(layer.name for layer, _ in pairs),
        first=totals[0],
        second=totals[1],
        agree=all(ratio >= 1 + AGREEING for ratio in asked) or all(ratio <= 1 - AGREEING for ratio in asked),
        sizes_known=sizes[0][0] is not None,
    )


def _time(layer: LayerReport) -> float:
    return layer.forward + layer.backward


def _samples(report: Report) -> tuple[float | None, Sequence[int]]:
    """Return how many samples a micro-batch has, if that is known, or else how many micro-batches there are."""
    sizes = {p.facts.batch_size / p.chunks if p.facts.batch_size else None for p in report.pipelines}
    known = sizes.pop() if len(sizes) == 1 else None
    return known, [] if known is not None else sorted(p.chunks for p in report.pipelines)


def _facts(report: Report) -> dict[str, DescribedLayer]:
    return {layer.name: layer for pipeline in report.pipelines for layer in pipeline.facts.layers}


def _work(facts: DescribedLayer | None, report: Report) -> tuple[object, ...]:
    """Return what must be the same for a layer to have as much to do, as far as it is known."""
    if facts is None:
        return ()
    batch = next((p.facts.batch_size for p in report.pipelines if facts in p.facts.layers), None)
    output = facts.output_bytes / batch if facts.output_bytes is not None and batch else None
    return facts.type, facts.parameter_bytes, output
