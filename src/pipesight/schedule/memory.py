"""The peak bytes that each device holds.

From its forward to its backward, a micro-batch keeps in a stage

- the stage's input, which came from another device;
- if it is not recomputed, the activations of its layers; else those from the recomputation on.

Where a schedule splits the backward, both stay until the gradients of the weights are done. The gradients of the
weights are there from the first backward on; those of an earlier mini-batch, to which they are added, all the time.
What a device holds depends on its own order alone, not on when its tasks run. In the middle of a task it is more than
at its ends::

    held      ┌───────────────┐         activations count from the beginning of a forward to the end of a backward
    in use    │  ╱╲_╱╲__╱╲    │         rise: how far the most in use is above what is held
              ╱            ╲__╱
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesight.schedule.costs import Costs, Peak
from pipesight.schedule.task_orders import B, F, Order, R, Schedule, W

__all__ = ["BlockBytes", "States", "block_bytes", "device_bytes", "held", "most_held", "peak_bytes"]

Bytes = NDArray[np.float64]
_Counts = NDArray[np.int64]


class States(NamedTuple):
    """What the stages of a device hold at any time: a row for each state that is reached, a column for each stage."""

    inputs: _Counts
    """In how many micro-batches they hold inputs."""
    activations: _Counts
    """In how many they hold activations."""
    waiting: _Counts
    """In how many the gradients of weights wait for their part of a backward."""
    gradients: _Counts
    """Whether they have gradients of weights."""
    forwards: _Counts
    """Whether a forward runs that keeps activations."""
    recomputations: _Counts
    """Whether a recomputation runs."""
    backwards: _Counts
    """Whether a backward runs that is not split."""
    split: _Counts
    """Whether the part of a split one runs that finds the gradients of inputs."""
    weights: _Counts
    """Whether the other part runs."""
    stepping: _Counts
    """Whether the optimizer runs."""
    outside: _Counts
    """Whether the loss of the batch is computed outside, from what the last stage has put out."""
    returned: _Counts
    """Whether what that has left is there, during backwards."""


class BlockBytes(NamedTuple):
    """What any block of consecutive layers holds as a stage, by first layer and the one after the last."""

    inputs: Bytes
    """To recompute a micro-batch."""
    activations: Bytes
    """For the backward of one, beside that."""
    waiting: Bytes
    """What the gradients of weights wait for in one, between the parts of its backward."""
    gradients: Bytes
    """Of weights, from the first backward on."""
    forwards: Bytes
    """What is in use above that in the middle of a forward, at most."""
    recomputations: Bytes
    """The same in a recomputation."""
    backwards: Bytes
    """The same in a backward."""
    split: Bytes
    """The same in that of the inputs."""
    weights: Bytes
    """The same in that of the weights."""
    stepping: Bytes
    """While the optimizer runs."""
    outside: Bytes
    """While the loss of the batch is computed outside."""
    returned: Bytes
    """What that leaves."""
    fixed: Bytes
    """Always; the first stage has the batch, too."""


def held(schedule: Schedule, *, inside: bool = False) -> list[States]:
    """Return, for each device, what its stages hold at any time. States that another one dominates are omitted.

    ``inside`` tells apart which task runs.
    """
    homes = np.asarray(schedule.device_of_stage)
    found = []
    for d, row in enumerate(schedule.order):
        waits = inside and d == homes[-1] and _waits(row, schedule.stages)
        found.append(_states(row[row[:, 0] >= 0], np.flatnonzero(homes == d), inside, waits))
    return found


def most_held(states: States, sizes: Sequence[Bytes]) -> Bytes:
    """Return the most bytes of any state; the sizes of stages are in the order of its fields, and may have dimensions
    more."""
    most: Bytes | None = None
    for state in zip(*states, strict=True):
        parts = [np.tensordot(count, size, 1) for count, size in zip(state, sizes, strict=False) if count.any()]
        total = np.asarray(sum(parts[1:], parts[0]) if parts else 0 * sizes[0][0], float)
        most = total if most is None else np.maximum(most, total)
    assert most is not None
    return most


def peak_bytes(schedule: Schedule, inputs: ArrayLike, activations: ArrayLike) -> Bytes:
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
    sizes = np.broadcast_arrays(np.asarray(inputs, float), np.asarray(activations, float))
    homes = np.asarray(schedule.device_of_stage)
    return np.stack([most_held(s, [size[homes == d] for size in sizes]) for d, s in enumerate(held(schedule))])


def device_bytes(
    schedule: Schedule, costs: Costs, balance: Sequence[int], *, parameter_scale: float = 2.0
) -> tuple[float, ...]:
    """Return the peak bytes of each device, parameters and activations, in any schedule.

    ``parameter_scale`` is the bytes held for each byte of parameters.
    """
    ends = np.cumsum(balance)
    blocks = block_bytes(costs, schedule, parameter_scale)
    homes = np.asarray(schedule.device_of_stage)
    peaks = []
    for device, states in enumerate(held(schedule, inside=costs.peaks_known)):
        mine = homes == device
        *sizes, fixed = (size[(ends - np.asarray(balance))[mine], ends[mine]] for size in blocks)
        peaks.append(float(most_held(states, sizes)) + float(fixed.sum()) + costs.other_bytes)
    return tuple(peaks)


def block_bytes(costs: Costs, schedule: Schedule, parameter_scale: float) -> BlockBytes:
    """Return what blocks of layers hold as stages of a schedule."""
    chunks = schedule.chunks
    inputs, kept = (size / chunks for size in _kept(costs))
    parameters = _sums([layer.parameter_bytes for layer in costs.layers])
    before, more = costs.gradients
    of_gradients = min(max(parameter_scale - 1.0, 0.0), more)
    gradients, nothing = parameters * of_gradients, 0 * parameters
    fixed = parameters * (parameter_scale - of_gradients)
    fixed[0, 1:] += costs.input_bytes
    waiting = _waiting(costs) / chunks
    if not costs.peaks_known:
        rises = nothing, nothing, nothing, nothing, nothing
        return BlockBytes(inputs, kept, waiting, gradients, *rises, nothing, nothing, nothing, fixed)
    again = _forward_rises(costs, chunks, inputs + kept, loss=False)
    forwards = _forward_rises(costs, chunks, inputs + kept, loss=True)
    split, whole = _backward_rises(costs, chunks, parameters)
    split, later = np.maximum(split - waiting, 0.0), parameters.copy()
    later[0] = whole[0]  # of a stage without inputs, that is the whole backward
    outside, returned = nothing.copy(), nothing.copy()
    most, left = costs.outside_peak
    if _waits(schedule.order[schedule.device_of_stage[-1]], schedule.stages):
        outside[:-1, -1], returned[:-1, -1] = most, left
    else:  # each micro-batch has its loss right after its last forward
        forwards[:-1, -1] += most / chunks
        whole[:-1, -1] += max(left, 0.0) / chunks
    stepping = parameters * (costs.optimizer_scale - min(before, of_gradients))  # they are summed by then
    rises = forwards, again, whole, split, later
    return BlockBytes(inputs, kept, waiting, gradients, *rises, stepping, outside, returned, fixed)


def _waiting(costs: Costs) -> Bytes:
    """Return what the gradients of weights wait for; in a stage without inputs, the whole backward does."""
    found = _sums([layer.waiting_bytes for layer in costs.layers])
    found[0] = 0.0
    return np.triu(found + np.array([0.0, *(layer.output_bytes for layer in costs.layers[:-1]), 0.0]), 1)


def _waits(tasks: Order, stages: int) -> bool:
    """Whether all forwards of the last stage are done before any other task but forwards."""
    forward = tasks[:, 0] == F
    last = np.flatnonzero(forward & (tasks[:, 1] == stages - 1))
    others = np.flatnonzero(~forward & (tasks[:, 0] >= 0))
    return len(last) > 1 and len(others) > 0 and bool(last[-1] < others[0])


def _kept(costs: Costs) -> tuple[Bytes, Bytes]:
    """Return what blocks keep of a batch to be recomputed, and what more they keep for a backward.

    Models that are cut at modules are recomputed module by module, so they keep the input of each, and all that those
    keep which are not recomputed. The last block keeps what the loss does.
    """
    count = len(costs.layers)
    outputs = np.array([0.0, *(layer.output_bytes for layer in costs.layers)])
    repeated = [
        before if layer.checkpointed else layer.kept_bytes
        for before, layer in zip(outputs[:count].tolist(), costs.layers, strict=True)
    ]
    kept, before = (
        np.concatenate([[0.0], np.cumsum(sizes)]) for sizes in ([layer.kept_bytes for layer in costs.layers], repeated)
    )
    first = np.array([*(layer.shared_bytes for layer in costs.layers), 0.0]) - outputs
    whole = kept[None, :] - kept[:, None] - first[:, None]
    single = np.array([*(not layer.checkpointed for layer in costs.layers), False])
    again = (
        before[None, :] - before[:, None] - (first * single)[:, None]
        if costs.by_cuts
        else np.repeat(outputs[:, None], count + 1, axis=1)
    )
    again[:, -1] += costs.loss_bytes
    whole[:, -1] += costs.loss_bytes
    inputs = np.triu(again, 1)
    return inputs, np.triu(np.maximum(whole - inputs, 0.0), 1)


def _forward_rises(costs: Costs, chunks: int, held: Bytes, *, loss: bool) -> Bytes:
    """Return how far a forward of blocks is above what they hold of a micro-batch; the loss is a layer of the last."""
    peaks = [*(layer.peak for layer in costs.layers), costs.loss_peak if loss else Peak()]
    before = np.concatenate([[0.0], np.cumsum([peak.forward_left for peak in peaks])])
    tops = before[:-1] + [peak.forward for peak in peaks]
    most = _most_from(np.repeat(tops[:, None], len(peaks), axis=1))
    given = np.array([0.0, *(layer.output_bytes for layer in costs.layers)])  # was there before
    found = (given[:, None] + most - before[:-1, None]) / chunks - held
    found[:, -1] += 0.0 if loss else costs.loss_bytes / chunks  # it is there already, and stays
    return np.triu(np.maximum(found, 0.0), 1)


def _backward_rises(costs: Costs, chunks: int, parameters: Bytes) -> tuple[Bytes, Bytes]:
    """Return the same of backwards that find the gradients of inputs alone, and of whole ones.

    A backward goes from the last layer to the first. Each leaves the gradients of its weights, and frees what it kept.
    """
    peaks = [*(layer.peak for layer in costs.layers), costs.loss_peak]
    count = len(costs.layers)
    own = np.array([peak.backward for peak in peaks])
    after = np.concatenate([[0.0], np.cumsum([peak.backward_left for peak in peaks])])
    ends = after[[*range(count), count + 1]]
    tops = (ends[None, :] - after[1:, None] + own[:, None]) / chunks
    whole = np.maximum(_most_from(tops + parameters), 0.0)
    arriving = np.array([0.0, *(layer.output_bytes for layer in costs.layers[:-1]), 0.0]) / chunks
    alone = np.maximum(_most_from(np.repeat(own[:, None], count + 1, axis=1)) / chunks, 0.0)
    return np.triu(alone + arriving, 1), np.triu(whole + arriving, 1)


def _most_from(tops: Bytes) -> Bytes:
    """Return the most from each layer to the end of a block; the last one of all is the loss, in the last block."""
    count = len(tops) - 1
    k, b = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
    found = np.where((k < b) | (b == count), tops, -np.inf)
    return np.asarray(np.maximum.accumulate(found[::-1], axis=0)[::-1])


def _sums(costs: Sequence[float]) -> Bytes:
    """Return the sums of all blocks; 0 where there is none."""
    total = np.concatenate([[0.0], np.cumsum(costs)])
    return np.asarray(np.maximum(total[None, :] - total[:, None], 0.0))


def _states(tasks: Order, stages: _Counts, inside: bool, waits: bool) -> States:
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

    def count(taken: NDArray[np.bool_]) -> _Counts:
        given = np.zeros_like(mine)
        given[1:] = (last[:, None] & mine)[:-1]
        found: _Counts = np.cumsum((taken[:, None] & mine).astype(np.int64) - given, axis=0)
        return found

    learnt = np.cumsum(last[:, None] & mine, axis=0)
    learned = np.zeros_like(mine, np.int64)  # while a task runs: those of earlier ones
    learned[1:] = learnt[:-1] > 0
    of_kinds = (takes_activations & (kinds == F), kinds == R, (kinds == B) & ~split, (kinds == B) & split, kinds == W)
    running = [(chosen[:, None] & mine & inside).astype(np.int64) for chosen in of_kinds]
    waits_for = np.cumsum(((kinds == B) & split)[:, None] & mine, axis=0)
    waits_for[1:] -= np.cumsum((kinds == W)[:, None] & mine, axis=0)[:-1]
    nothing, none_of_all = np.zeros(len(stages), np.int64), np.zeros_like(learned)
    returned = ((kinds != F)[:, None] & (np.arange(len(stages)) == len(stages) - 1) & waits).astype(np.int64)
    inputs, activations = count(takes_input), count(takes_activations)
    rows = [np.concatenate([inputs, activations, waits_for, learned, *running, *[none_of_all] * 2, returned], axis=1)]
    rows.append(
        np.concatenate([*[nothing] * 3, learnt[-1] > 0, *[nothing] * 5, nothing + inside, *[nothing] * 2])[None]
    )
    if waits:  # from the first task that is no forward on, all forwards are done
        k = int(np.argmax(kinds != F)) - 1
        rows.append(np.concatenate([inputs[k], activations[k], *[nothing] * 8, returned[-1], nothing])[None])
    found = np.unique(np.concatenate(rows).astype(np.int64), axis=0)
    if len(found) <= 2048:
        found = found[[(found >= row).all(axis=1).sum() == 1 for row in found]]
    return States(*np.split(found, len(States._fields), axis=1))
