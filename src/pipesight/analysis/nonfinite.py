"""The first tensor of a run that went NaN or Inf, from its statistics.

A line of statistics counts the NaN and Inf of its tensor, and says where the first of them was computed. Of one rank,
the session that measured knows the order of computation; ranks are compared by the way of the data::

    iteration | weights | forward: micro-batch + partition, layers downwards | backward: layers upwards
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipesight.runs.reading.stats_and_logs import is_nonfinite

__all__ = ["NonFinite", "first_nonfinite", "place_of", "rank_of"]

_PARTITION = re.compile(r"^(?:module\.)?partitions\.\d+\.")

# In the order of a step: weights are there before the forward, which goes down the model; the backward goes up again.
_WEIGHT, _FORWARD, _GRADIENT, _WEIGHT_GRADIENT = range(4)
_PASS = {"gradient": _GRADIENT, "dgrad": _GRADIENT, "wgrad": _WEIGHT_GRADIENT, "weight": _WEIGHT}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with NaN or Inf in it."""

    iteration: int
    """The training step."""
    layer: str
    """Its name in the model."""
    tensor: str
    """Such as `activation` or `gradient`."""
    rank: int
    """The rank that logged it."""
    nans: int | None
    """NaN elements, if they were counted."""
    infs: int | None
    """Infinite elements, if they were counted."""
    layers: int
    """How many layers had such a tensor in that iteration."""
    iterations: int
    """In how many iterations there was one."""
    partition: int | None = None
    """Of the pipeline it was computed in, if it was in one; so are the micro-batch and the phase."""
    microbatch: int | None = None
    """In which it was computed."""
    phase: str | None = None
    """`forward`, `recompute`, `backward` or `weight`."""

    @property
    def where(self) -> str:
        """The place in words, such as ``iteration 3, partition 1, micro-batch 2, forward``."""
        words = [f"iteration {self.iteration}"]
        if self.microbatch is not None:
            words += [f"partition {self.partition}", f"micro-batch {self.microbatch}", f"{self.phase}"]
        return ", ".join(words)


def first_nonfinite(lines: Iterable[Mapping[str, Any]], *, layers: Sequence[str] = ()) -> NonFinite | None:
    """Find the first tensor that is not finite: the one computed first in the lowest iteration."""
    places = {name: place for place, name in enumerate(layers)}
    iterations: set[int] = set()
    bad_layers: set[str] = set()
    best: dict[int, tuple[tuple[int, ...], Mapping[str, Any]]] = {}  # of each rank
    for line in lines:
        iteration, layer, tensor = line.get("iteration"), line.get("layer"), line.get("tensor")
        if not is_nonfinite(line) or not isinstance(layer, str) or not isinstance(tensor, str):
            continue
        if not isinstance(iteration, int) or isinstance(iteration, bool):
            continue
        lowest = min(iterations, default=iteration)
        iterations.add(iteration)
        if iteration < lowest:
            bad_layers, best = set(), {}
        elif iteration > lowest:
            continue
        bad_layers.add(layer)
        rank, key = rank_of(line), _in_process(line, places)
        known = best.get(rank)
        if known is None or key < known[0]:
            best[rank] = key, line
        elif key == known[0] and all(line[k] == known[1][k] for k in ("layer", "tensor")):
            best[rank] = key, {**known[1], **{k: v for k, v in line.items() if k in ("nans", "infs")}}
    if not best:
        return None
    rank, (_, first) = min(best.items(), key=lambda of_rank: (_between_ranks(of_rank[1][1], places), of_rank[0]))
    phase = first.get("phase")
    return NonFinite(
        iteration=first["iteration"],
        layer=first["layer"],
        tensor=first["tensor"],
        rank=rank,
        nans=_count(first.get("nans")),
        infs=_count(first.get("infs")),
        layers=len(bad_layers),
        iterations=len(iterations),
        partition=_count(first.get("partition")),
        microbatch=_count(first.get("microbatch")),
        phase=phase if isinstance(phase, str) else None,
    )


def rank_of(line: Mapping[str, Any]) -> int:
    """Return the rank that a tensor with NaN or Inf was on: the first of ``ranks``, or the one that wrote the line."""
    ranks = line.get("ranks")
    named = _count(ranks[0]) if isinstance(ranks, list) and ranks else None
    return (_count(line.get("rank")) or 0) if named is None else named


def _in_process(line: Mapping[str, Any], places: Mapping[str, int]) -> tuple[int, ...]:
    """Return a sort key for the tensors of one rank: the order of computation that the session logged, if it did."""
    order = _count(line.get("order"))
    return (0, order) if order is not None else (1, *_when(line["layer"], line["tensor"], places))


def _between_ranks(line: Mapping[str, Any], places: Mapping[str, int]) -> tuple[int, ...]:
    """Return a sort key for the first tensors of ranks that does not depend on their clocks."""
    which, place, later = _when(line["layer"], line["tensor"], places)
    partition, microbatch = _count(line.get("partition")) or 0, _count(line.get("microbatch")) or 0
    return min(which, _GRADIENT), partition + microbatch if which == _FORWARD else 0, place, which, later


def _when(layer: str, tensor: str, places: Mapping[str, int]) -> tuple[int, int, int]:
    """Return a sort key for tensors by when a step computes them, guessed from their names."""
    which = _PASS.get(tensor, _FORWARD)
    place = place_of(layer, places)
    return which, -place if which in (_GRADIENT, _WEIGHT_GRADIENT) else place, tensor != "input"


def place_of(layer: str, places: Mapping[str, int]) -> int:
    """Return the place of a layer, or of the one that it is part of."""
    name = _PARTITION.sub("", layer)
    while name:
        if name in places:
            return places[name]
        name = name.rpartition(".")[0]
    return len(places)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
