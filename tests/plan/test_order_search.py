"""Orders that are searched: never slower than those with a name, within the memory, and what list scheduling makes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipesight.plan import (
    Costs,
    Layer,
    Link,
    Setting,
    best_plans,
    check_schedule,
    predict,
    recorded,
    search_orders,
    simulated,
)
from pipesight.plan.plans import distributed_call
from pipesight.schedule.list_scheduling import PREFERENCES, StageTimes, list_schedule
from pipesight.schedule.task_orders import B, F, R, W
from pipesight.schedule.weight_placement import place_weights


def models(head):
    layers = [Layer(f"l{k}", 1.0, 2.0, kept_bytes=8.0, output_bytes=1.0, parameter_bytes=1.0) for k in range(6)]
    return Costs((*layers, Layer("head", head, head, kept_bytes=4.0)), forward_overhead=0.05, backward_overhead=0.05)


@settings(deadline=None, max_examples=10)
@given(
    st.sampled_from(["gpipe", "1f1b", "zero-bubble", "zbv-zero-bubble", "v-min"]),
    st.sampled_from([2, 3]),
    st.integers(2, 6),
    st.sampled_from(["never", "except_last"]),
    st.floats(1.0, 1.6),
    st.floats(0.0, 6.0),
)
def test_a_search_never_loses(schedule, n, m, checkpoint, more, head):
    """What is found is complete, as fast as it says, no slower than where it began, and keeps within the memory."""
    costs = models(head)
    setting = Setting(schedule, n, m, checkpoint)
    assume(setting.runs and setting.stages <= 7)
    plans = best_plans(costs, [setting])
    limit = max(plans[0].memory_bytes) * more
    found = search_orders(costs, plans, memory=limit)
    assert found.step_seconds <= plans[0].step_seconds
    assert max(found.memory_bytes) <= limit
    assert check_schedule(found.schedule).runs
    assert float(simulated(costs, found).makespan) == pytest.approx(found.window_seconds)
    assert found.schedule.chunks == m
    again = (found.schedule.order[..., 0] == R).sum()
    assert again == (plans[0].schedule.order[..., 0] == R).sum()


def test_a_search_finds_what_has_no_name():
    """With times for which no named order is best, the search beats all of them; unsplit where it must be."""
    costs = Costs((Layer("a", 1, 5), Layer("b", 4, 1), Layer("c", 1, 5)), link=Link(latency=0.4))
    plans = best_plans(costs, [Setting(name, 3, 6, "never") for name in ("gpipe", "1f1b", "zero-bubble")])
    found = search_orders(costs, plans)
    assert found.step_seconds < plans[0].step_seconds * 0.99
    assert found.schedule_name == "searched"
    assert found.schedule.split.any()
    whole = search_orders(costs, [plan for plan in plans if plan.setting.schedule != "zero-bubble"], split=False)
    assert not whole.schedule.split.any()
    assert found.call() is None
    assert 'schedule="mine.csv"' in distributed_call(found, file="mine.csv")
    assert "cuts=" in str(distributed_call(found, ["x", "y", "z"]))
    assert 'schedule="mine.csv"' in str(found.call(in_steps=True, file="mine.csv"))
    in_v = predict(costs, Setting("zbv-zero-bubble", 1, 6, "never"), [2, 1])
    assert in_v.call(in_steps=True) is None  # nothing to share
    with pytest.raises(ValueError, match="plans: 0"):
        search_orders(costs, [])
    with pytest.raises(ValueError, match="the order must have the stages and chunks"):
        predict(costs, Setting("1f1b", 3, 5, "never"), [1, 1, 1], order=found.schedule)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(PREFERENCES), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(2, 5), st.data())
def test_lists_keep_within_memory(preference, n, m, split, room, data):
    """List scheduling makes complete orders that never hold more than the limit, walked task by task."""
    homes = tuple(data.draw(st.sampled_from([[*range(n)], [*range(n), *range(n)], [*range(n), *reversed(range(n))]])))
    one = [1.0] * len(homes)
    times = StageTimes(
        homes, one, one, one, one if split else None, [0.5] * len(homes), 0.1, one, one, [2.0 * room] * n
    )
    order = list_schedule(times, m, preference, again=[False] * m)
    if order is None:  # no room for one micro-batch in each stage
        assert room < len(homes) // n + 1
        return
    assert check_schedule(order).runs
    assert max(check_schedule(order).held) <= room
    assert order.split.all() == split


def test_weights_fill_gaps():
    """Weight gradients go where a device waits; before a forward for which there is no memory, they come first."""
    tasks = [(F, 0), (F, 1), (B, 0), (W, 0), (B, 1), (W, 1)]
    late = [[(k, s, i) for k, i in tasks] for s in (0, 1)]
    schedule = recorded(np.array(late))
    unit = [[1.0, 1.0]] * 4
    seconds = [[1.0, 1.0], [1.0, 1.0], [1.0, 2.0], [1.0, 1.0]]  # device 0 waits for the backwards of device 1
    free = place_weights(schedule, seconds, [1.0, 1.0], [math.inf] * 2)
    words = [" ".join(f"{'FRBW'[k]}{i}" for k, _, i in row.tolist()) for row in free.order]
    assert words == ["F0 F1 B0 W0 B1 W1", "F0 F1 B0 B1 W0 W1"]
    three = recorded(np.array([[(k, 0, i) for k, i in [(F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1)]]]))
    assert place_weights(three, unit, [1.0], [1.0]).order.tolist() == three.order.tolist()
    assert place_weights(three, unit, [1.0], [2.0]).order[0, :4, 0].tolist() == [F, B, F, B]
