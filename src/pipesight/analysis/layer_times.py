"""How long each layer takes: forward, recomputed, backward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipesight.analysis.described_pipelines import DescribedLayer
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from pipesight.runs.reading.event_tables import Column, LayerTimes, Tasks

__all__ = ["LayerReport", "layer_reports", "with_weights"]


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A layer and its times, in microseconds."""

    name: str
    """Its name in the model."""
    partition: int
    """The one that runs it."""
    type: str | None
    """The class of the module, if it is known."""
    place: int
    """In the model, from 0."""
    forward: float
    """The mean of one micro-batch; likewise the next two."""
    recompute: float
    """The same of a recomputation."""
    backward: float
    """The same of a backward."""
    runs: tuple[int, int, int]
    """How many micro-batches the means are of."""
    total: int
    """Time in all its runs."""
    share: float
    """Of the time in all layers."""
    longest: int
    """Its longest run."""

    @property
    def cost(self) -> float:
        """What one micro-batch costs in this layer, with as many recomputations as there were."""
        return self.total / max(self.runs[0], 1)


def layer_reports(times: LayerTimes, facts: Sequence[DescribedLayer] = ()) -> list[LayerReport]:
    """Put the times of each layer together, over all ranks, in the order of the model.

    Without ``facts`` the order is that of partitions and, in them, of names, numbers in names counting as such.
    """
    known = {(fact.partition, fact.name): (place, fact) for place, fact in enumerate(facts)}
    groups: dict[tuple[int, str], list[int]] = {}
    keys = zip(times.partition.tolist(), times.layer.tolist(), strict=True)
    for row, (partition, name) in enumerate(keys):
        groups.setdefault((int(partition), str(name)), []).append(row)
    everything = max(int(times.total.sum()), 1)
    places = {key: place for place, key in enumerate(sorted(groups, key=lambda key: _order(key, known)))}
    found = []
    for (partition, name), rows in groups.items():
        own = times.where(np.array(rows))
        sums = [_sums(own, FORWARD), _sums(own, RECOMPUTE), _sums(own, BACKWARD, WEIGHT)]
        fact = known.get((partition, name), (0, None))[1]
        forward, recompute, backward = (total / count if count else 0.0 for count, total in sums)
        total = int(own.total.sum())
        found.append(
            LayerReport(
                name=name,
                partition=partition,
                type=None if fact is None else fact.type,
                place=places[partition, name],
                forward=forward,
                recompute=recompute,
                backward=backward,
                runs=(sums[0][0], sums[1][0], sums[2][0]),
                total=total,
                share=total / everything,
                longest=int(own.longest.max()),
            )
        )
    return sorted(found, key=lambda layer: layer.place)


def with_weights(times: LayerTimes, tasks: Tasks, steps: range | None = None) -> LayerTimes:
    """Add the gradients of weights that were computed in no order of layers, and so have tasks but no layers.

    Their time is shared out over the layers of the partition in proportion to the backwards of these or, if they have
    none, to the forwards. ``times`` and what is taken of ``tasks`` are of the same steps.
    """
    weights = tasks.where(tasks.phase == WEIGHT)
    if steps is not None:
        weights = weights.where(np.isin(weights.step, [step for step in np.unique(weights.step) if int(step) in steps]))
    added = []
    for rank, partition in np.unique(np.stack([weights.rank, weights.partition]), axis=1).T.tolist():
        own = times.where((times.rank == rank) & (times.partition == partition))
        there = (weights.rank == rank) & (weights.partition == partition)
        count = int(there.sum())
        alone = count - int(own.count[own.phase == WEIGHT].max(initial=0))  # tasks without layers
        known = next((rows for phase in (BACKWARD, WEIGHT, FORWARD) if (rows := own.phase == phase).any()), None)
        if alone <= 0 or known is None:
            continue
        shown = own.where(known)
        total = int((weights.end - weights.begin)[there].sum()) * alone / count
        parts = np.cumsum(shown.total if shown.total.any() else np.ones(len(shown)))
        shares = np.diff(np.rint(total * parts / parts[-1]).astype(np.int64), prepend=0)
        same = {"rank": shown.rank, "partition": shown.partition, "layer": shown.layer}
        numbers = {"phase": WEIGHT, "count": alone, "longest": 0}
        filled = {name: np.full(len(shown), number) for name, number in numbers.items()}
        added.append(LayerTimes(**same, **filled, total=shares))
    return LayerTimes.joined(times, *added) if added else times


def _sums(times: LayerTimes, *phases: int) -> tuple[int, int]:
    """Return how often a layer ran, and how long; of phases that are parts of one, the count of the most frequent."""
    counts = [int(times.count[times.phase == phase].sum()) for phase in phases]
    rows: Column = np.isin(times.phase, phases)
    return max(counts), int(times.total[rows].sum())


def _order(key: tuple[int, str], known: dict[tuple[int, str], tuple[int, DescribedLayer]]) -> tuple[object, ...]:
    partition, name = key
    numbers = tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name))
    place = known[key][0] if key in known else len(known)
    return partition, place, numbers
