"""Where on the timeline a tensor lies that is not finite: its partition, and the block that computed it, if known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipesight.analysis.lane_bubbles import Lane
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD
from pipesight.view.payload.statistic_tables import Marks

__all__ = ["lanes_of_tensor", "marks_of_step"]

_PARTITION = re.compile(r"^(?:module\.)?partitions\.(\d+)\.")
_BACKWARD = ("dgrad", "wgrad", "gradient")


def marks_of_step(
    marks: Marks,
    number: int,
    *,
    lanes: Sequence[Lane],
    partitions: Mapping[str, int],
    tasks: Mapping[str, Sequence[int]],
) -> list[list[Any]]:
    """Return the marks of a step: layer, lane, phase, micro-batch and what is wrong, in the order of the model.

    Of a mark without a micro-batch the block is not known: the line of statistics does not say, or there are several
    that it may be, those of other mini-batches or ranks.

    ``partitions`` has that of each layer; ``tasks`` are the blocks of the step, with ``lane``, ``phase`` and
    ``microbatch`` of each.
    """
    blocks = Counter(zip(tasks["lane"], tasks["phase"], tasks["microbatch"], strict=True))
    found: list[list[Any]] = []
    for (layer, tensor, rank), mark in marks.of_step.get(number, {}).items():
        known = partitions if mark.partition is None else {layer: mark.partition}
        own, phase = lanes_of_tensor(layer, tensor, rank, lanes=lanes, partitions=known)
        phase = phase if mark.phase is None else mark.phase
        text = f"{tensor} {mark.text}" if " is " in mark.text else f"{tensor} has {mark.text}"
        if len(own) == 1 and mark.microbatch is not None and blocks[own[0], phase, mark.microbatch] == 1:
            first = f"{text} in this step, first in micro-batch {mark.microbatch}"
            found.append([layer, own[0], phase, mark.microbatch, first])
        else:
            found += [[layer, k, None, None, text] for k in own or (None,)]
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
