"""The peak bytes that each device holds.

From its forward to its backward, a micro-batch keeps in a stage

- the stage's input, which came from another device or from the data;
- if it is not recomputed, the activations of its layers; else those from the recomputation on.

Where a schedule splits the backward, both stay until the gradients of the weights are done. What a device holds depends
on its own order alone, not on when its tasks run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesight.schedule.costs import Costs
from pipesight.schedule.task_orders import B, F, Order, R, Schedule, W

__all__ = ["device_bytes", "held", "peak_bytes"]


def held(schedule: Schedule) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return, for each device, in how many micro-batches its stages hold inputs and activations, at any time.

    Two arrays, of inputs and of activations, have a column for each stage of the device and a row for each state that
    is reached. States that another one dominates are omitted.
    """
    stages = np.asarray(schedule.device_of_stage)
    return [_states(row[row[:, 0] >= 0], np.flatnonzero(stages == d)) for d, row in enumerate(schedule.order)]


def peak_bytes(schedule: Schedule, inputs: ArrayLike, activations: ArrayLike) -> NDArray[np.float64]:
    """Return the peak bytes of activations on each device.

    >>> peak_bytes(gpipe(2, 8), inputs=[1, 1], activations=[10, 10]).tolist()
    [88.0, 88.0]
    >>> peak_bytes(one_f_one_b(2, 8), inputs=[1, 1], activations=[10, 10]).tolist()
    [22.0, 11.0]

    Args:
        schedule: Who runs what.
        inputs: Bytes of the input of each stage, for one micro-batch; more dimensions are a batch.
        activations: Bytes that the layers of each stage keep for one micro-batch.
    """
    bytes_in, bytes_kept = np.broadcast_arrays(np.asarray(inputs, float), np.asarray(activations, float))
    peaks = []
    for device, (of_inputs, of_activations) in enumerate(held(schedule)):
        stages = [s for s, home in enumerate(schedule.device_of_stage) if home == device]
        at = np.tensordot(of_inputs, bytes_in[stages], 1) + np.tensordot(of_activations, bytes_kept[stages], 1)
        peaks.append(at.max(axis=0))
    return np.stack(peaks)


def device_bytes(
    schedule: Schedule, costs: Costs, balance: Sequence[int], *, parameter_scale: float = 2.0
) -> tuple[float, ...]:
    """Return the peak bytes of each device, parameters and activations, in any schedule.

    Args:
        schedule: Who runs what.
        costs: Those of the layers.
        balance: How many layers each stage has.
        parameter_scale: Bytes held for each byte of parameters.
    """
    ends = np.cumsum(balance)
    begins = ends - np.asarray(balance)
    outputs = [costs.input_bytes, *(layer.output_bytes for layer in costs.layers)]
    blocks = [costs.layers[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    kept = [sum(layer.kept_bytes for layer in block) / schedule.chunks for block in blocks]
    peaks = peak_bytes(schedule, np.asarray(outputs)[begins] / schedule.chunks, kept)
    held_always = [sum(layer.parameter_bytes for layer in block) * parameter_scale for block in blocks]
    np.add.at(peaks, list(schedule.device_of_stage), held_always)
    return tuple(peaks.tolist())


def _states(tasks: Order, stages: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Walk along the tasks of a device: memory is taken when one starts, and given back when it ends."""
    column = np.searchsorted(stages, tasks[:, 1])
    kinds, mine = tasks[:, 0], column[:, None] == np.arange(len(stages))
    # A micro-batch that is recomputed has activations from then on only, and one that is split keeps them longer.
    keys = tasks[:, 1].astype(np.int64) * (tasks[:, 2].max() + 1) + tasks[:, 2]
    recomputed = np.isin(keys, keys[kinds == R])
    split = np.isin(keys, keys[kinds == W])
    last = (kinds == W) | ((kinds == B) & ~split)
    learns = np.isin(keys, keys[kinds == B])  # a forward without a backward keeps nothing
    takes_input = (kinds == F) & learns
    takes_activations = ((kinds == F) & ~recomputed & learns) | (kinds == R)

    def count(taken: NDArray[np.bool_]) -> NDArray[np.int64]:
        given = np.zeros_like(mine)
        given[1:] = (last[:, None] & mine)[:-1]
        found: NDArray[np.int64] = np.cumsum((taken[:, None] & mine).astype(np.int64) - given, axis=0)
        return found

    both = np.unique(np.concatenate([count(takes_input), count(takes_activations)], axis=1), axis=0)
    if len(both) <= 2048:
        larger = (both[None] >= both[:, None]).all(-1)
        both = both[larger.sum(1) == 1]
    return both[:, : len(stages)], both[:, len(stages) :]
