"""Costs are cut into contiguous blocks, provably as well as they can be."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.balance import balance_cost


def block_costs(costs, balance):
    ends = [sum(balance[:j]) for j in range(len(balance) + 1)]
    return [sum(map(Fraction, costs[a:b]), Fraction()) for a, b in pairwise(ends)]


def badness(costs, balance):
    blocks = block_costs(costs, balance)
    return max(blocks), sum(b**2 for b in blocks), sum(layers**2 for layers in balance)


def all_balances(layers, partitions):
    for cuts in combinations(range(1, layers), partitions - 1):
        yield [b - a for a, b in pairwise((0, *cuts, layers))]


def costs_and_partitions(cost):
    return st.lists(cost, min_size=1, max_size=9).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )


def assert_best(costs, partitions):
    balance = balance_cost(costs, partitions)
    assert len(balance) == partitions
    assert sum(balance) == len(costs)
    assert min(balance) >= 1
    assert badness(costs, balance) == min(badness(costs, other) for other in all_balances(len(costs), partitions))


@settings(deadline=None)
@given(costs_and_partitions(st.integers(0, 6)))
def test_small_integers_match_brute_force(case):
    """With many zeros and ties, no other cut is better."""
    assert_best(*case)


@settings(deadline=None)
@given(costs_and_partitions(st.floats(0, 1e3)))
def test_floats_match_brute_force(case):
    """With floats, no other cut is better, not by the last bit."""
    assert_best(*case)


@settings(deadline=None)
@given(costs_and_partitions(st.floats(0, allow_infinity=False) | st.integers(0, 2**80)))
def test_extreme_and_mixed_costs_match_brute_force(case):
    """Costs may be tiny, huge, or integers that no float can hold."""
    assert_best(*case)


def test_rounding_does_not_decide():
    """A cost that float addition would swallow still decides where to cut."""
    tiny = 2.0**-60
    assert balance_cost([1.0, tiny, 1.0 - 2.0**-53], 2) == [1, 2]
    assert balance_cost([1.0 - 2.0**-53, tiny, 1.0], 2) == [2, 1]


@pytest.mark.parametrize("cost", [1, 0, 0.1, 10**400])
def test_equal_costs_are_cut_evenly(cost):
    """When all layers cost the same, even nothing, the partitions differ by one layer at most."""
    balance = balance_cost([cost] * 11, 4)
    assert sorted(balance) == [2, 3, 3, 3]


def test_heavy_layer_is_alone_and_the_rest_is_even():
    """The largest sum is fixed by one layer; the other partitions are balanced among themselves."""
    assert balance_cost([1, 1, 1, 1, 100, 1, 1], 4) == [2, 2, 1, 2]


def test_one_layer_each_and_one_for_all():
    """As many partitions as layers give one layer each; one partition takes all."""
    assert balance_cost([3, 0, 5.5], 3) == [1, 1, 1]
    assert balance_cost([3, 0, 5.5], 1) == [3]


@pytest.mark.parametrize("partitions", [1, 8, 100, 3000])
def test_thousands_of_layers(partitions):
    """Large models are cut too; by an independent greedy check, no smaller bound is possible."""
    costs = [1 + (index * 7919) % 104729 for index in range(2999)] + [50_000_000]
    balance = balance_cost(costs, partitions)
    assert (len(balance), sum(balance), min(balance) >= 1) == (partitions, 3000, True)

    bound, blocks, room = int(max(block_costs(costs, balance))) - 1, 0, -1
    for cost in costs:
        room -= cost
        if room < 0:
            blocks, room = blocks + 1, bound - cost
    assert blocks > partitions or bound < max(costs)


@pytest.mark.parametrize("partitions", [0, -1, True, 2.0, "2", None])
def test_partitions_must_be_a_positive_integer(partitions):
    """Anything but a positive integer is rejected by name and value."""
    with pytest.raises(ValueError, match="partitions must be a positive integer") as error:
        balance_cost([1, 2, 3], partitions)
    assert repr(partitions) in str(error.value)


@pytest.mark.parametrize(("costs", "partitions"), [([1, 2], 3), ([], 1)])
def test_no_partition_can_be_empty(costs, partitions):
    """There must be a layer for every partition."""
    with pytest.raises(ValueError, match=rf"layers: {len(costs)}, partitions: {partitions}"):
        balance_cost(costs, partitions)


@pytest.mark.parametrize("cost", [-1, -0.5, math.nan, math.inf, -math.inf])
def test_costs_must_be_finite_and_not_negative(cost):
    """A cost that makes no sense is rejected with its layer and value."""
    with pytest.raises(ValueError, match=rf"costs must be finite and not negative \(cost of layer 1: {cost}\)"):
        balance_cost([1, cost, 3], 2)
