"""The peak bytes that each device holds.

From its forward to its backward, a micro-batch keeps in a stage

- the stage's input, which came from another device;
- if it is not recomputed, the activations of its layers; else those from the recomputation on.

Where a schedule splits the backward, both stay until the gradients of the weights are done. The gradients of the
weights are there from the first backward on. What a device holds depends
on its own order alone, not on when its tasks run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesight.schedule.costs import Costs
from pipesight.schedule.task_orders import B, F, Order, R, Schedule, W

__all__ = ["activation_bytes", "device_bytes", "gradient_scale", "held", "peak_bytes"]


def held(schedule: Schedule) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Return, for each device, what its stages hold at any time.

    Three arrays say in how many micro-batches they hold inputs and activations, and whether they have gradients of
    weights. They have a column for each stage of the device and a row for each state that
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
    for device, (of_inputs, of_activations, _) in enumerate(held(schedule)):
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
    blocks = [costs.layers[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    inputs, kept = (bytes_of[begins, ends] / schedule.chunks for bytes_of in activation_bytes(costs))
    parameters = np.array([sum(layer.parameter_bytes for layer in block) for block in blocks])
    of_gradients = gradient_scale(parameter_scale) if costs.minibatches == 1 else 0.0
    homes = np.asarray(schedule.device_of_stage)
    peaks = []
    for device, (of_inputs, of_activations, learned) in enumerate(held(schedule)):
        mine = homes == device
        at = of_inputs @ inputs[mine] + of_activations @ kept[mine]
        at = at + learned @ (parameters[mine] * of_gradients)
        fixed = float(parameters[mine].sum()) * (parameter_scale - of_gradients)
        peaks.append(float(at.max()) + fixed + (costs.input_bytes if mine[0] else 0.0))
    return tuple(peaks)


def activation_bytes(costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what blocks of layers keep of a batch to be recomputed, and what more they keep for a backward.

    By first layer, and the one after the last. Models that are cut at modules are recomputed module by module, so they
    keep the input of each. The last block keeps what the loss does.
    """
    count = len(costs.layers)
    outputs = np.array([0.0, *(layer.output_bytes for layer in costs.layers)])
    kept, before = (
        np.concatenate([[0.0], np.cumsum(sizes)])
        for sizes in ([layer.kept_bytes for layer in costs.layers], outputs[:count])
    )
    first = np.array([*(layer.shared_bytes for layer in costs.layers), 0.0]) - outputs
    whole = kept[None, :] - kept[:, None] - first[:, None]
    again = before[None, :] - before[:, None] if costs.by_cuts else np.repeat(outputs[:, None], count + 1, axis=1)
    again[:, -1] += costs.loss_bytes
    whole[:, -1] += costs.loss_bytes
    inputs = np.triu(again, 1)
    return inputs, np.triu(np.maximum(whole - inputs, 0.0), 1)


def gradient_scale(parameter_scale: float) -> float:
    """Return how many of the bytes that are held for each byte of parameters are gradients: as many as there are."""
    return min(max(parameter_scale - 1.0, 0.0), 1.0)


def _states(tasks: Order, stages: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
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

    learnt = np.cumsum(last[:, None] & mine, axis=0)
    learned = np.zeros_like(mine, np.int64)  # while a task runs: those of earlier ones
    learned[1:] = learnt[:-1] > 0
    found = np.concatenate([count(takes_input), count(takes_activations), learned], axis=1)
    after = np.concatenate([np.zeros(2 * len(stages), np.int64), (learnt[-1] > 0).astype(np.int64)])
    found = np.unique(np.concatenate([found, after[None]]), axis=0)
    if len(found) <= 2048:
        larger = (found[None] >= found[:, None]).all(-1)
        found = found[larger.sum(1) == 1]
    inputs, activations, gradients = np.split(found, 3, axis=1)
    return inputs, activations, gradients
