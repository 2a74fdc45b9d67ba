"""The first tensor of a run that went NaN or Inf, from its statistics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SIGNS", "NonFinite", "first_nonfinite", "place_of", "rank_of"]

SIGNS = ("nonfinite", "nans", "infs")
"""What a line of statistics has, one of these at least, if its tensor was not finite."""

_PARTITION = re.compile(r"^(?:module\.)?partitions\.\d+\.")

# In the order of a step: the forward goes down the model, the backward up again, then come the weights.
_FORWARD, _GRADIENT, _WEIGHT_GRADIENT, _WEIGHT = range(4)
_PASS = {"gradient": _GRADIENT, "dgrad": _GRADIENT, "wgrad": _WEIGHT_GRADIENT, "weight": _WEIGHT}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with NaN or Inf in it."""

    iteration: int
    layer: str
    tensor: str
    rank: int
    nans: int | None
    infs: int | None
    layers: int
    """How many layers had such a tensor in that iteration."""
    iterations: int
    """In how many iterations there was one."""


def first_nonfinite(lines: Iterable[Mapping[str, Any]], *, layers: Sequence[str] = ()) -> NonFinite | None:
    """Find the first tensor that is not finite: of the lowest iteration, where the step came to it first.

    Args:
        lines: Of statistics; ``rank`` is that of a line, if it says.
        layers: The names of the model's layers, in order.
    """
    places = {name: place for place, name in enumerate(layers)}
    best: tuple[tuple[int, int, int, int], Mapping[str, Any]] | None = None
    iterations: set[int] = set()
    bad_layers: set[str] = set()
    for line in lines:
        if "nonfinite" not in line and not line.get("nans") and not line.get("infs"):
            continue
        iteration, layer, tensor = line.get("iteration"), line.get("layer"), line.get("tensor")
        if not isinstance(iteration, int) or not isinstance(layer, str) or not isinstance(tensor, str):
            continue
        iterations.add(iteration)
        if best is None or iteration < best[0][0]:
            bad_layers = set()
        if best is None or iteration <= best[0][0]:
            bad_layers.add(layer)
            key = (iteration, *_when(layer, tensor, places))
            if best is None or key < best[0]:
                best = key, line
            elif key == best[0] and all(line[k] == best[1][k] for k in ("layer", "tensor")):
                best = key, {**best[1], **{k: v for k, v in line.items() if k in ("nans", "infs")}}
    if best is None:
        return None
    first = best[1]
    return NonFinite(
        iteration=first["iteration"],
        layer=first["layer"],
        tensor=first["tensor"],
        rank=rank_of(first),
        nans=_count(first.get("nans")),
        infs=_count(first.get("infs")),
        layers=len(bad_layers),
        iterations=len(iterations),
    )


def rank_of(line: Mapping[str, Any]) -> int:
    """Return the rank that a tensor with NaN or Inf was on: the first of ``ranks``, or the one that wrote the line."""
    ranks = line.get("ranks")
    named = _count(ranks[0]) if isinstance(ranks, list) and ranks else None
    return (_count(line.get("rank")) or 0) if named is None else named


def _when(layer: str, tensor: str, places: Mapping[str, int]) -> tuple[int, int, int]:
    """Return what sorts tensors by when a step comes to them."""
    which = _PASS.get(tensor, _FORWARD)
    place = place_of(layer, places)
    return which, -place if which == _GRADIENT else place, tensor != "input"


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
