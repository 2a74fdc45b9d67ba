"""The planner: its balance is the best of all, by simulating all of them, and it keeps to the memory there is."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipesight.plan import (
    SCHEDULES,
    Costs,
    DoesNotFitError,
    Layer,
    Link,
    Setting,
    best_plans,
    predict,
    simulate,
)
from pipesight.plan import settings as all_settings
from pipesight.schedule.argument_checks import CHECKPOINT_MODES
from pipesight.schedule.lower_bounds import bounds
from pipesight.schedule.setting import LOOPS
from pipesight.schedule.stage_costs import StageCosts
from pipesight.schedule.task_orders import B, F, R, W


def all_balances(layers, stages):
    for cuts in combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in pairwise((0, *cuts, layers))]


seconds = st.sampled_from([0.0, 1.0, 2.0, 3.0]) | st.floats(0, 5)
sizes = st.integers(0, 6).map(float)


@st.composite
def layered(draw, most=7):
    """Draw the costs of a model."""
    count = draw(st.integers(1, most))
    layers = [
        Layer(
            f"layer{k}",
            draw(seconds),
            draw(seconds),
            draw(st.none() | seconds),
            kept_bytes=draw(sizes),
            output_bytes=draw(sizes),
            parameter_bytes=draw(sizes),
        )
        for k in range(count)
    ]
    return Costs(
        tuple(layers),
        input_bytes=draw(sizes),
        forward_overhead=draw(seconds) + 0.01,
        forward_gap=draw(st.sampled_from([0.0, 0.25, 0.5])),
        backward_gap=draw(st.sampled_from([0.0, 0.25, 0.5])),
        recompute_overhead=draw(seconds),
        backward_overhead=draw(seconds) + 0.01,
        loss=draw(seconds),
        link=draw(st.sampled_from([Link(), Link(bandwidth=2.0, latency=0.5)])),
    )


@st.composite
def problems(draw):
    """Draw the costs of a model, and a setting that is possible for it."""
    costs = draw(layered())
    layers = len(costs.layers)
    schedule = draw(st.sampled_from(SCHEDULES))
    checkpoint = draw(st.sampled_from(CHECKPOINT_MODES))
    rounds = draw(st.integers(1, 2)) if schedule in LOOPS else Setting(schedule, 1, 1).rounds
    n = draw(st.integers(1, max(1, layers // rounds)))
    assume(n * rounds <= layers)
    m = n * draw(st.integers(1, 2)) if rounds > 1 else draw(st.integers(1, 5))
    assume(schedule != "dualpipev" or m >= 2 * n)
    return costs, Setting(schedule, n, m, checkpoint, rounds)


def brute_force(costs, setting, limit=math.inf):
    """Return the least time, and the least memory, of all balances."""
    plans = [predict(costs, setting, balance) for balance in all_balances(len(costs.layers), setting.stages)]
    fitting = [plan.step_seconds for plan in plans if max(plan.memory_bytes) <= limit]
    return min(fitting, default=math.inf), min(max(plan.memory_bytes) for plan in plans)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(problems())
def test_balance_is_the_best_of_all(problem):
    """No other balance has a shorter simulation, in any schedule and checkpoint mode, and the plan says so."""
    costs, setting = problem
    (plan,) = best_plans(costs, [setting])
    assert plan.step_seconds == pytest.approx(brute_force(costs, setting)[0], rel=1e-8)
    assert plan.proven


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(problems())
def test_balance_is_the_best_of_all_without_looking_at_all(problem):
    """Branch and bound finds what looking at all balances finds."""
    costs, setting = problem
    assume(setting.schedule in ("gpipe", "1f1b", "zero-bubble") and setting.rounds == 1)
    search = importlib.import_module("pipesight.plan.balance_search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_FEW", 0)
        (plan,) = best_plans(costs, [setting])
    best, _ = brute_force(costs, setting)
    assert plan.bound_seconds <= best * (1 + 1e-8)
    assert plan.step_seconds >= best * (1 - 1e-8)
    assert plan.proven
    assert plan.step_seconds == pytest.approx(best, rel=1e-8)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(layered(), st.integers(1, 2), st.integers(1, 2), st.sampled_from(CHECKPOINT_MODES))
def test_many_interleaved_balances_are_improved(costs, n, groups, checkpoint):
    """With too many cuts to look at all, an interleaved plan is no worse than moving single layers makes it."""
    assume(2 * n <= len(costs.layers))
    setting = Setting("interleaved", n, n * groups, checkpoint, 2)
    search = importlib.import_module("pipesight.plan.balance_search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_FEW", 0)
        (plan,) = best_plans(costs, [setting])
    best, _ = brute_force(costs, setting)
    assert plan.bound_seconds <= best * (1 + 1e-8) <= plan.step_seconds * (1 + 1e-7)
    for k in range(2 * n - 1):
        for by in (-1, 1):
            other = [*plan.balance]
            other[k], other[k + 1] = other[k] + by, other[k + 1] - by
            if min(other) > 0:
                assert plan.step_seconds <= predict(costs, setting, other).step_seconds * (1 + 1e-8)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(problems(), st.integers(0, 60), st.booleans())
def test_memory_limit_is_kept(problem, limit, few):
    """Of the balances that fit, the best is found; if none does, the error says how much the least needs."""
    costs, setting = problem
    assume(few or (setting.schedule in ("gpipe", "1f1b", "zero-bubble") and setting.rounds == 1))
    best, least = brute_force(costs, setting, limit)
    search = importlib.import_module("pipesight.plan.balance_search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_FEW", search._FEW if few else 0)
        if math.isinf(best):
            with pytest.raises(DoesNotFitError, match=f"smallest needs {math.ceil(round(least, 6))} B"):
                best_plans(costs, [setting], memory=limit)
            return
        (plan,) = best_plans(costs, [setting], memory=limit)
    assert plan.step_seconds == pytest.approx(best, rel=1e-8)
    assert max(plan.memory_bytes) <= limit


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(problems())
def test_bounds_hold(problem):
    """No cut is faster than its bound; GPipe's is its time."""
    costs, setting = problem
    blocks = StageCosts(costs, setting)
    balances = [*all_balances(len(costs.layers), setting.stages)]
    cuts = np.array([[0, *np.cumsum(balance)] for balance in balances]).T
    least, real = bounds(blocks, cuts), blocks.simulate(cuts).makespan
    assert (least <= real * (1 + 1e-9) + 1e-9).all()
    if setting.schedule == "gpipe":
        assert real == pytest.approx(least, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_large_models_are_searched(schedule):
    """Of the 10^11 cuts of 64 layers into 16, the best one is found, and proven if the bound is met."""
    rng = np.random.default_rng(0)
    times = rng.integers(1, 9, size=(2, 64)).tolist()
    costs = Costs(tuple(Layer(str(k), f, b) for k, (f, b) in enumerate(zip(*times, strict=True))))
    (plan,) = best_plans(costs, [Setting(schedule, 16, 32, "never")])
    blocks = StageCosts(costs, plan.setting)
    cut = np.concatenate([[0], np.cumsum(plan.balance)])
    shifts = np.stack([cut + (np.arange(17) == k) * by for k in range(1, 16) for by in (-1, 1)], axis=1)
    shifts = shifts[:, (np.diff(shifts, axis=0) > 0).all(axis=0)]
    assert plan.window_seconds <= blocks.simulate(shifts).makespan.min() * (1 + 1e-9)
    assert plan.bound_seconds <= plan.step_seconds <= 1.05 * plan.bound_seconds
    if schedule == "gpipe":
        assert plan.proven


def test_gpipe_needs_both_slowest_stages():
    """The slowest forward and the slowest backward count, in different stages too: cutting by their sum is worse."""
    layers = [Layer("a", 4, 0), Layer("b", 0, 4), Layer("c", 4, 0), Layer("d", 0, 4)]
    costs = Costs(tuple(layers))
    (plan,) = best_plans(costs, [Setting("gpipe", 2, 10, "never")])
    assert plan.balance == (2, 2)
    assert plan.window_seconds == pytest.approx((8 + 8 + 9 * (4 + 4)) / 10)
    skewed = predict(costs, plan.setting, [1, 3])
    assert skewed.window_seconds == pytest.approx((8 + 8 + 9 * (4 + 8)) / 10)


def test_chunks_share_the_layers_time_but_not_the_overhead():
    """A layer's time is divided among micro-batches; each task costs its overhead, so that too many are slow."""
    costs = Costs(tuple(Layer(str(k), 8, 8) for k in range(4)), samples=64, forward_overhead=1, backward_overhead=1)
    windows = {
        plan.setting.chunks: plan.window_seconds
        for plan in best_plans(costs, all_settings(costs, partitions=2, schedules=["gpipe"], checkpoints=["never"]))
    }
    assert windows[1] == 2 * 2 * (16 + 1)
    assert windows[4] == (4 + 1) * 2 * (4 + 1)
    assert min(windows, key=windows.get) == 4
    assert [*windows] == sorted(windows, key=windows.get)


def test_links_take_time():
    """Each cut costs its latency, and its bytes by the bandwidth, on the way there and back."""
    costs = Costs(tuple(Layer(str(k), 1, 1, output_bytes=100 * k) for k in range(2)), link=Link(50.0, 3.0))
    plan = predict(costs, Setting("gpipe", 2, 1, "never"), [1, 1])
    assert plan.window_seconds == 4 + 2 * (3 + 0 / 50)
    wide = Costs((Layer("a", 1, 1, output_bytes=100), Layer("b", 1, 1)), link=Link(50.0, 3.0))
    assert predict(wide, Setting("gpipe", 2, 1, "never"), [1, 1]).window_seconds == 4 + 2 * (3 + 2)
    assert predict(wide, Setting("gpipe", 1, 1, "never"), [2]).window_seconds == 4


def test_memory_of_plans():
    """Checkpointed micro-batches keep inputs, the others all activations; gradients come with the first backward."""
    layer = Layer("a", 1, 1, kept_bytes=80, output_bytes=8, parameter_bytes=5)
    costs = Costs((layer, layer), input_bytes=16)

    def memory(schedule, checkpoint):
        return predict(costs, Setting(schedule, 2, 8, checkpoint), [1, 1]).memory_bytes

    # 5 bytes of weights always, those of gradients from the first backward on; the first device has the batch.
    assert memory("gpipe", "never") == (16 + 8 * 10 + 5, 8 * (1 + 10) + 5)
    assert memory("gpipe", "always") == (16 + 10 + 10, 7 * 1 + 10 + 10)
    assert memory("gpipe", "except_last") == (16 + 10 + 10, 7 * 1 + 10 + 10)
    assert memory("1f1b", "never") == (16 + 2 * 10 + 10, 1 + 10 + 10)
    assert memory("1f1b", "always") == (16 + 10 + 10, 1 + 10 + 10)
    # A first stage has no gradients of inputs: its weights wait for those of its output.
    assert memory("zero-bubble", "never") == (16 + 2 * 10 + 10 + 1, 2 * (1 + 10) + 10)


def test_layers_that_are_not_recomputed():
    """Checkpointing neither takes their time again nor frees what they keep; partitions of them alone do not change."""
    layers = tuple(Layer(name, 3, 6, kept_bytes=80, output_bytes=8, checkpointed=name != "b") for name in "aba")
    costs = Costs(layers, input_bytes=16, by_cuts=True, recompute_overhead=1.0)
    never, always = (predict(costs, Setting("1f1b", 1, 2, mode), [3]) for mode in ("never", "always"))
    assert always.window_seconds == never.window_seconds + 3 + 3 + 2 * 1
    alone = replace(costs, layers=(layers[1],) * 3)
    never, always = (predict(alone, Setting("1f1b", 3, 4, mode), [1, 1, 1]) for mode in ("never", "always"))
    assert (never.window_seconds, never.memory_bytes) == (always.window_seconds, always.memory_bytes)


def plain_peak(schedule, device, inputs, kept):
    """Walk through the tasks of a device, one by one."""
    tasks = [tuple(task) for task in schedule.order[device].tolist() if task[0] >= 0]
    now = most = 0
    for kind, s, i in tasks:
        again, split = (R, s, i) in tasks, (W, s, i) in tasks
        if kind == F:
            now += inputs[s] + (0 if again else kept[s])
        if kind == R:
            now += kept[s]
        most = max(most, now)
        if kind == (W if split else B):
            now -= inputs[s] + kept[s]
    assert now == 0
    return most


@settings(deadline=None)
@given(problems(), st.data())
def test_peak_of_any_schedule(problem, data):
    """The most that a device holds is that of a walk through its tasks."""
    from pipesight.plan import peak_bytes

    _, setting = problem
    schedule = setting.build()
    numbers = st.lists(st.integers(0, 9), min_size=setting.stages, max_size=setting.stages)
    inputs, kept = data.draw(numbers), data.draw(numbers)
    found = peak_bytes(schedule, inputs, kept)
    assert found.tolist() == [plain_peak(schedule, d, inputs, kept) for d in range(schedule.devices)]


def test_plans_are_what_the_simulator_says():
    """Time and bubble of a plan are those of simulating its schedule with the times of its stages."""
    costs = Costs(tuple(Layer(str(k), 1 + k, 2) for k in range(4)), outside=3.0, minibatches=2)
    plan = predict(costs, Setting("1f1b", 2, 4, "always"), [3, 1])
    durations = np.array([[6, 4], [6, 4], [6, 2], [0, 0]])[:, :, None] / 4
    found = simulate(plan.setting.build(), durations)
    assert plan.window_seconds == found.makespan
    assert plan.step_seconds == 2 * found.makespan + 3.0
    assert plan.bubble == found.bubble


def test_settings_that_are_possible():
    """Interleaved schedules need layers for all rounds and groups of micro-batches; chunks need samples."""
    costs = Costs(tuple(Layer(str(k), 1, 1) for k in range(4)), samples=12)
    found = [*all_settings(costs, partitions=2)]
    assert {setting.chunks for setting in found} == {1, 2, 4, 8}
    assert {s.chunks for s in found if s.schedule == "1f1b"} == {1, 2, 4, 8}
    assert {s.chunks for s in found if s.schedule == "dualpipev"} == {4, 8}
    assert {s.schedule for s in found} == {*SCHEDULES}
    assert {s.schedule for s in all_settings(costs, partitions=3)} == {"gpipe", "1f1b", "zero-bubble"}
    with pytest.raises(ValueError, match="too few layers for the partitions"):
        [*all_settings(costs, partitions=5)]
    with pytest.raises(ValueError, match=r"chunks: 13, samples: 12"):
        [*all_settings(costs, partitions=2, chunks=[13])]


def test_wrong_plans_are_refused():
    """A balance that is none, a schedule that there is not, and costs that are none are named."""
    costs = Costs((Layer("a", 1, 1), Layer("b", 1, 1)))
    with pytest.raises(ValueError, match=r"balance: \[1, 2\], stages: 2, layers: 2"):
        predict(costs, Setting("gpipe", 2, 1), [1, 2])
    with pytest.raises(ValueError, match="schedule must be one of gpipe, 1f1b, interleaved, looped-bfs, zero-bubble"):
        Setting("dualpipe", 2, 1)
    with pytest.raises(ValueError, match="only interleaved ones have several"):
        Setting("gpipe", 2, 1, rounds=2)
    with pytest.raises(ValueError, match="has two rounds"):
        Setting("v-min", 2, 1, rounds=3)
    with pytest.raises(ValueError, match="finite and not negative"):
        Layer("a", -1, 1)
    with pytest.raises(ValueError, match="must have at least one layer"):
        Costs(())
