"""Samples are packed into micro-batches with the same work, and simulated steps get back most of what they lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pipesight.balance import pack
from pipesight.schedule.packing import chunk_sizes, longest_inside
from pipesight.schedule.simulation import simulate
from pipesight.schedule.task_orders import B, F, gpipe, one_f_one_b


def loads(costs, order, chunks):
    """Return the work of each micro-batch, cut by torch."""
    return [float(part.sum()) for part in torch.tensor(costs, dtype=torch.float64)[order].chunk(chunks)]


def lengths(count, seed):
    """Return what samples cost: some much more than others."""
    return 0.6 + 2.5 * np.random.default_rng(seed).random(count) ** 4


def step_time(schedule, work):
    """Simulate a step whose backwards take twice as long as its forwards."""
    durations = np.zeros((4, schedule.stages, schedule.chunks))
    durations[F], durations[B] = work, 2 * np.asarray(work)
    return float(simulate(schedule, durations).makespan)


@pytest.mark.parametrize(("count", "chunks"), [(1, 3), (5, 8), (12, 4), (10, 4), (64, 7), (96, 1)])
def test_pack(count, chunks):
    """It is an order of all samples; the heaviest micro-batch is no heavier than it was, as torch cuts them."""
    for seed in range(20):
        costs = lengths(count, seed)
        order = pack(costs, chunks)
        assert sorted(order) == list(range(count))
        packed, given = (loads(costs, list(way), chunks) for way in (order, range(count)))
        assert len(packed) == len(chunk_sizes(count, chunks))
        assert max(packed) <= max(given) + 1e-9
        if count >= 4 * chunks and count % chunks == 0:
            assert max(packed) <= 1.02 * np.mean(packed)


def test_close_to_the_best():
    """Of all ways to cut eight samples into four pairs, the packed one is almost as even as the best."""
    for seed in range(2):
        costs = lengths(8, seed)
        best = min(max(loads(costs, list(order), 4)) for order in itertools.permutations(range(8)) if order[0] == 0)
        assert max(loads(costs, pack(costs, 4), 4)) <= 1.001 * best


@pytest.mark.parametrize("costs", [[1.0, -1.0], [1.0, float("nan")], [float("inf")]])
def test_refused(costs):
    """What is no amount of work is refused, with the values."""
    with pytest.raises(ValueError, match=r"costs must be finite and not negative \(costs: "):
        pack(costs, 2)


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
def test_packing_recovers_the_loss(make):
    """With four samples in each micro-batch, packing recovers most of what a step loses to their differences."""
    schedule = make(4, 8)
    lost = left = 0.0
    for seed in range(10):
        costs = lengths(32, seed)
        even = step_time(schedule, np.full(8, costs.sum() / 8))
        lost += step_time(schedule, loads(costs, list(range(32)), 8)) - even
        left += step_time(schedule, loads(costs, pack(costs, 8), 8)) - even
    assert left <= 0.2 * lost


def test_order_recovers_half_of_the_loss():
    """With one sample in each micro-batch, 1F1B gets back more than half by their order alone: short, long, short."""
    schedule = one_f_one_b(4, 16)
    lost = left = 0.0
    for seed in range(30):
        costs = lengths(16, seed)
        even = step_time(schedule, np.full(16, costs.mean()))
        lost += step_time(schedule, costs) - even
        left += step_time(schedule, costs[pack(costs, 16)]) - even
        assert pack(costs, 16) == longest_inside(costs.tolist())
    assert left <= 0.5 * lost
