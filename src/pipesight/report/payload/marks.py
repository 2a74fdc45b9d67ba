"""Where on the timeline a tensor lies that is not finite: its partition, and the phase that computes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipesight.report.payload.statistics import Marks
from pipesight.report.payload.timeline import Lane
from pipesight.report.reading.tables import BACKWARD, FORWARD

__all__ = ["lanes_of_tensor", "marks_of_step"]

_PARTITION = re.compile(r"^(?:module\.)?partitions\.(\d+)\.")
_BACKWARD = ("dgrad", "wgrad", "gradient")


def marks_of_step(
    marks: Marks, number: int, *, lanes: Sequence[Lane], partitions: Mapping[str, int]
) -> list[list[Any]]:
    """Return the marks of a step: layer, lane, phase and what is wrong, in the order of the model.

    Args:
        marks: Of all steps.
        number: The step.
        lanes: Those that are shown.
        partitions: The partition of each layer.
    """
    found: list[list[Any]] = []
    for (layer, tensor), (rank, text) in marks.of_step.get(number, {}).items():
        own, phase = lanes_of_tensor(layer, tensor, rank, lanes=lanes, partitions=partitions)
        found += [[layer, k, phase, f"{tensor} has {text}" if " is " not in text else f"{tensor} {text}"] for k in own]
        if not own:
            found.append([layer, None, None, f"{tensor}: {text}"])
    return found


def lanes_of_tensor(
    layer: str, tensor: str, rank: int, *, lanes: Sequence[Lane], partitions: Mapping[str, int]
) -> tuple[list[int], int]:
    """Return the lanes that compute a tensor of a layer, those of its rank if there are any, and in which phase."""
    partition = _partition(layer, partitions)
    places = [k for k, lane in enumerate(lanes) if lane.partition == partition]
    own = [k for k in places if lanes[k].rank == rank] or places
    return own, BACKWARD if tensor in _BACKWARD else FORWARD


def _partition(layer: str, partitions: Mapping[str, int]) -> int | None:
    """Return the partition of a layer, or of the one that it is part of."""
    if match := _PARTITION.match(layer):
        return int(match[1])
    name = layer
    while name and name not in partitions:
        name = name.rpartition(".")[0]
    return partitions.get(name)
