"""Layers side by side: what each takes in a step of two runs."""

from __future__ import annotations

from dataclasses import dataclass

from pipesight.analysis.report import Report

__all__ = ["CHANGED", "LayerChange", "layer_changes"]

CHANGED = 0.05
"""Of what a layer took, what it must differ by to be called changed."""
WORTH = 0.001
"""And of the first run's step."""


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer in two runs: microseconds in the mean step, all its micro-batches together; nothing where it is not."""

    name: str
    partitions: tuple[int | None, int | None]
    first: float | None
    second: float | None
    changed: bool
    """Whether it is there in one run alone, or differs by more than noise."""

    @property
    def change(self) -> float:
        """The second less the first."""
        return (self.second or 0.0) - (self.first or 0.0)


def layer_changes(first: Report, second: Report) -> list[LayerChange]:
    """Return the layers of both runs, those that differ most first."""
    before, after = _times(first), _times(second)
    step = first.overall.time.mean if first.overall is not None else 0.0
    found = []
    for name in {**before, **after}:
        (j, a), (k, b) = before.get(name, (None, None)), after.get(name, (None, None))
        differs = abs((b or 0.0) - (a or 0.0)) >= max(CHANGED * max(a or 0.0, b or 0.0), WORTH * step)
        found.append(LayerChange(name, (j, k), a, b, changed=a is None or b is None or differs))
    return sorted(found, key=lambda layer: (not layer.changed, -abs(layer.change)))


def _times(report: Report) -> dict[str, tuple[int | None, float | None]]:
    """Return the partition of each layer, and what it takes in the mean step of a replica."""
    if not report.counted.any():
        return {}
    often = float(report.steps.microbatches[report.counted].mean())
    found: dict[str, tuple[int | None, float | None]] = {}
    for layer in report.layers:
        partition, time = found.get(layer.name, (layer.partition, 0.0))
        found[layer.name] = partition, (time or 0.0) + layer.cost * often
    return found
