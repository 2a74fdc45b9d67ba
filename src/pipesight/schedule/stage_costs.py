"""What any block of consecutive layers would cost as a stage, in one setting: arrays over first and last layer.

``time[B][a, b]`` is the backward of layers a to b - 1 on one micro-batch. A cut of the model picks one block per stage;
an array of cuts, of shape (stages + 1, cuts), picks thousands at once.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesight.schedule.contention import rate_of
from pipesight.schedule.costs import SPLIT_COST, Costs
from pipesight.schedule.memory import block_bytes, held, most_held
from pipesight.schedule.setting import Setting
from pipesight.schedule.simulation import Simulation, Times, simulate
from pipesight.schedule.task_orders import B, F, R, Schedule, W, recomputed

__all__ = ["Cuts", "StageCosts"]

Cuts: TypeAlias = NDArray[np.int64]


class StageCosts:
    """The costs of all blocks in one setting, in its own order of tasks or in another one."""

    def __init__(
        self, costs: Costs, setting: Setting, *, parameter_scale: float = 2.0, order: Schedule | None = None
    ) -> None:
        self.costs, self.setting = costs, setting
        self.schedule = setting.build(joined=costs.loss_outside) if order is None else order
        self.crowded = rate_of(costs.rates, self.schedule.devices) < 1
        """Whether devices slow each other down."""
        self.layers, m = len(costs.layers), setting.chunks
        layers = costs.layers
        self.split = self.schedule.split
        """For each stage and micro-batch, whether its weight gradients are a task of their own."""
        each = _sums([layer.forward_each for layer in layers])
        again = [layer.forward if layer.recompute is None else layer.recompute for layer in layers]
        repeated = np.array([layer.checkpointed for layer in layers])
        forward = _sums([layer.forward for layer in layers]) / m + each
        recompute = _sums(repeated * again) / m + _sums(repeated * [layer.forward_each for layer in layers])
        backward = _sums([layer.backward for layer in layers]) / m + _sums([layer.backward_each for layer in layers])
        self.gaps = np.array([costs.forward_gap, costs.recompute_gap, costs.backward_gap, costs.backward_gap])
        """Seconds of each task, by kind, in which its device does not compute."""
        beside = [costs.forward_overhead, costs.recompute_overhead, costs.backward_overhead, costs.backward_overhead]
        self.beside = np.array(beside) + self.gaps
        """Seconds of each task, by kind, outside its layers."""
        in_two = (1 + SPLIT_COST) * backward
        in_two[0] = backward[0]  # nobody waits for gradients of the model's inputs, so nothing runs twice
        of_weights = np.where(np.arange(len(backward))[:, None] > 0, costs.weight_share, 1.0) * in_two
        in_parts = np.stack([in_two - of_weights, of_weights])
        self.in_parts: Times = np.maximum(in_parts + self.beside[[B, W], None, None], 0.0)
        """Seconds of the two parts of a backward, by first layer and the one after the last."""
        self.whole: Times = np.maximum(backward + self.beside[B], 0.0)
        """Seconds of a backward that is not split."""
        there = np.maximum(np.stack([forward, recompute]) + self.beside[[F, R], None, None], 0.0)
        there[R][_sums(repeated) == 0] = 0.0
        back = self.in_parts if self.split.any() else np.stack([self.whole, np.zeros_like(self.whole)])
        self.time: Times = np.concatenate([there, back])
        """Seconds of a task of each kind, likewise; backwards are split if any is."""
        sizes = np.array([costs.input_bytes, *(layer.output_bytes for layer in layers)]) / m
        self.send: Times = np.array([0.0, *(costs.link.seconds(size) for size in sizes[1:-1]), 0.0])
        """Seconds from one stage to the next, by the layer that the next begins with."""
        if setting.partitions == 1:
            self.send[:] = 0.0
        self.loss = costs.loss if self.schedule.joined else costs.loss / m
        self.bytes = block_bytes(costs, self.schedule, parameter_scale)
        """What blocks hold."""
        self.again = sum(recomputed(setting.checkpoint, m))
        self._held = held(self.schedule, inside=costs.peaks_known)

    def simulate(self, cuts: Cuts) -> Simulation:
        """Run the schedule for each of the cuts."""
        begin, end = cuts[:-1], cuts[1:]
        delays = np.zeros((2, *begin.shape))
        delays[0], delays[1] = self.send[begin], self.send[end]
        homes = np.asarray(self.schedule.device_of_stage)
        together = np.flatnonzero(homes[1:] == homes[:-1])  # next to each other on one device: nothing is sent
        delays[0, together + 1] = delays[1, together] = 0.0
        delays[1, -1] = self.loss
        times = np.maximum(self.time[:, begin, end] - self.gaps[:, None, None], 0.0)[:, :, None]
        if self.split.any() and not self.split.all():
            whole = np.maximum(self.whole[begin, end] - self.gaps[B], 0.0)[:, None]
            times = np.repeat(times, self.split.shape[1], axis=2)
            times[B] = np.where(self.split[..., None], times[B], whole)
        return simulate(self.schedule, times, delays=delays[:, :, None], gaps=self.gaps, rates=self.costs.rates)

    def bubble(self, simulation: Simulation) -> Times:
        """Return the share of time in which devices do not compute; gaps before tasks are part of it."""
        computing = simulation.busy.mean(axis=0)
        length = np.asarray(simulation.makespan, float)
        return np.asarray(1 - np.divide(computing, length, out=np.ones_like(length), where=length > 0))

    def busy(self) -> Times:
        """Return how long a device computes for a block in all micro-batches, at least, by first and last layer."""
        m = self.setting.chunks
        split = self.time[B] + self.time[W]
        backward = split if self.split.all() else self.whole if not self.split.any() else np.minimum(split, self.whole)
        return np.asarray(m * (self.time[F] + backward) + self.again * self.time[R])

    def memory(self, cuts: Cuts) -> Times:
        """Return the peak bytes of each device for each of the cuts: parameters and activations."""
        begin, end = cuts[:-1], cuts[1:]
        homes = np.asarray(self.schedule.device_of_stage)
        needs = []
        for device in range(self.setting.partitions):
            first, last = begin[homes == device], end[homes == device]
            *sizes, fixed = (size[first, last] for size in self.bytes)
            needs.append(most_held(self._held[device], sizes) + fixed.sum(axis=0))
        return np.stack(needs) + self.costs.other_bytes

    def memory_of_blocks(self) -> Times:
        """Return the bytes that each device needs for any one block."""
        if self.setting.rounds != 1:
            raise ValueError(f"devices have several blocks each (rounds: {self.setting.rounds})")
        *sizes, fixed = self.bytes
        alone = [most_held(states, [size[None] for size in sizes]) for states in self._held]
        return np.stack(alone) + fixed + self.costs.other_bytes


def _sums(costs: ArrayLike) -> Times:
    """Return the sums of all blocks, by first and last layer; 0 where there is none."""
    total = np.concatenate([[0.0], np.cumsum(costs)])
    return np.asarray(np.maximum(total[None, :] - total[:, None], 0.0))
