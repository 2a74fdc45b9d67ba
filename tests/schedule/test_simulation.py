"""The simulator: right to the last bit against a plain loop over events, and against what is known of schedules."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.plan import DeadlockError, gpipe, interleaved, one_f_one_b, recorded, simulate, zero_bubble
from pipesight.schedule.contention import Concurrency, rates_of
from pipesight.schedule.task_orders import B, F, R, W


def plain(schedule, durations, delays):
    """Run one task at a time, any that can run, until none is left; return begins and ends by task."""
    queues = [[tuple(task) for task in row if task[0] >= 0] for row in schedule.order.tolist()]
    free = [0.0] * len(queues)
    begin, end = {}, {}
    last = schedule.stages - 1

    def arrival(kind, s, i):
        """When the input of a task is there; None if it is not known yet."""
        everything = [end.get((F, last, k)) for k in range(schedule.chunks)]
        joined = None if None in everything else max(everything) + delays[1][last][i]
        if kind == F:
            before = 0.0 if s == 0 else end.get((F, s - 1, i))
            return None if before is None else before + delays[0][s][i]
        if kind == R:
            return joined if schedule.joined else 0.0
        if kind == W:
            return end.get((B, s, i))
        if s == last and schedule.joined:
            return joined
        before = end.get((F, s, i) if s == last else (B, s + 1, i))
        return None if before is None else before + delays[1][s][i]

    while any(queues):
        for device, queue in enumerate(queues):
            if queue and (there := arrival(*queue[0])) is not None:
                task = queue.pop(0)
                begin[task] = max(free[device], there)
                end[task] = free[device] = begin[task] + durations[task[0]][task[1]][task[2]]
                break
        else:
            raise AssertionError("the plain loop is stuck")
    return begin, end, max(free)


@st.composite
def schedules(draw):
    """Draw any schedule that there is, with any recomputations."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    again = draw(st.lists(st.booleans(), min_size=m, max_size=m))
    kind = draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]))
    if kind == "zero-bubble":
        return zero_bubble(n, m, recompute=again)
    if kind == "interleaved":
        rounds, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        again = draw(st.lists(st.booleans(), min_size=n * groups, max_size=n * groups))
        return interleaved(n * rounds, n * groups, devices=n, recompute=again)
    homes = draw(st.none() | st.lists(st.integers(0, 2), min_size=n, max_size=n))
    if homes is not None:
        homes = [sorted({*homes}).index(home) for home in homes]
    if kind == "1f1b":
        return one_f_one_b(n, m, recompute=again, device_of_stage=homes)
    return gpipe(n, m, recompute=again, device_of_stage=homes, joined=draw(st.booleans()))


def times(rng, *shape):
    """Draw times with many zeros and ties among them."""
    return rng.choice([0.0, 1.0, 1.0, 2.0, 0.1, rng.random()], size=shape)


@settings(deadline=None, max_examples=60)
@given(schedules(), st.integers(0, 2**32))
def test_equals_a_plain_loop_over_events(schedule, seed):
    """Every begin and end is that of running one task after the other, for each step of a batch."""
    rng = np.random.default_rng(seed)
    batch = 3
    durations = times(rng, 4, schedule.stages, schedule.chunks, batch)
    delays = times(rng, 2, schedule.stages, schedule.chunks, batch)
    found = simulate(schedule, durations, delays=delays)
    for k in range(batch):
        begin, end, makespan = plain(schedule, durations[..., k].tolist(), delays[..., k].tolist())
        assert found.makespan[k] == makespan
        tasks = {tuple(map(int, task)) for task in np.argwhere(~np.isnan(found.begin[..., k]))}
        assert tasks == {*begin}
        for task in tasks:
            assert found.begin[task][k] == begin[task]
            assert found.end[task][k] == end[task]


@settings(deadline=None)
@given(schedules(), st.integers(0, 2**32))
def test_a_batch_is_its_steps(schedule, seed):
    """A batch of any shape gives what its steps give one by one; without delays, it gives what zeros give."""
    rng = np.random.default_rng(seed)
    durations = times(rng, 4, schedule.stages, schedule.chunks, 2, 3)
    together = simulate(schedule, durations)
    assert together.makespan.shape == (2, 3)
    assert together.busy.shape == (schedule.devices, 2, 3)
    for a, b in np.ndindex(2, 3):
        alone = simulate(schedule, durations[..., a, b], delays=np.zeros((2, 1, 1)))
        for field in ("begin", "end", "makespan", "busy"):
            np.testing.assert_array_equal(getattr(together, field)[..., a, b], getattr(alone, field))


def uniform(forward, backward, weight=0.0):
    return np.array([forward, forward, backward, weight])[:, None, None]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_bubble_of_gpipe_and_1f1b(n, m, forward, backward):
    """With equal stages, the bubble of GPipe, and that of 1F1B, is (n - 1) / (m + n - 1)."""
    for schedule in (gpipe(n, m), gpipe(n, m, joined=True), one_f_one_b(n, m)):
        found = simulate(schedule, uniform(forward, backward))
        assert found.makespan == (m + n - 1) * (forward + backward)
        assert math.isclose(found.bubble, (n - 1) / (m + n - 1), abs_tol=1e-12)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_bubble_of_interleaved(n, groups, rounds, forward, backward):
    """With v equal stages a device, the bubble is (n - 1) / (v m + n - 1)."""
    m = n * groups
    found = simulate(interleaved(n * rounds, m, devices=n), uniform(forward, backward))
    assert found.makespan == (rounds * m + n - 1) * (forward + backward)
    assert math.isclose(found.bubble, (n - 1) / (rounds * m + n - 1), abs_tol=1e-12)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 4))
def test_bubble_of_zero_bubble(n, more, time):
    """With equal tasks and m >= n, only (n - 1)(F + B - W) is left of the bubble: a third of that of 1F1B."""
    m = n + more
    found = simulate(zero_bubble(n, m), uniform(time, time, time))
    assert found.makespan == 3 * m * time + (n - 1) * time
    assert found.makespan <= simulate(one_f_one_b(n, m), uniform(time, 2 * time)).makespan


@pytest.mark.parametrize("checkpoint_all", [True, False])
def test_recomputation_hides_behind_the_gradient(checkpoint_all):
    """What is recomputed before its gradient is there costs no time in the stages that wait."""
    again = [True, True, checkpoint_all]
    found = simulate(gpipe(3, 3, recompute=again, joined=True), uniform(1, 1))
    assert found.makespan == (3 + 2) + (3 + 2) + sum(again)
    if checkpoint_all:
        assert (found.begin[R, :, 2] == 5).all()


def test_joined_recomputation_waits_for_the_loss():
    """In our engine no stage recomputes before all forwards have ended; elsewhere it may, in the bubble."""
    durations, delays = np.ones((4, 3, 2)), np.zeros((2, 3, 2))
    delays[1, 2] = 7.0  # the loss
    again = [True, True]
    alone = simulate(gpipe(3, 2, recompute=again), durations, delays=delays)
    joined = simulate(gpipe(3, 2, recompute=again, joined=True), durations, delays=delays)
    assert alone.begin[R, 0, 1] == 2
    assert joined.begin[R, 0, 1] == 4 + 7


def test_delays_are_waited_for():
    """An output is at the next stage when the delay has passed, each way; the first input, from the start."""
    delays = np.zeros((2, 2, 1))
    delays[0], delays[1] = [[3], [5]], [[7], [11]]
    found = simulate(gpipe(2, 1), np.ones((4, 2, 1)), delays=delays)
    assert found.begin[F, :, 0].tolist() == [3, 9]
    assert found.begin[B, :, 0].tolist() == [29, 21]
    assert found.makespan == 30


def test_busy_is_what_a_device_computes():
    """A device is busy with the tasks of all its stages, and the bubble is the rest."""
    found = simulate(gpipe(4, 2, device_of_stage=[0, 0, 1, 1]), uniform(1, 2))
    assert found.busy.tolist() == [12, 12]
    assert found.bubble == 1 - 12 / found.makespan


def test_forwards_alone():
    """A pass for evaluation has no backwards."""
    found = simulate(recorded([[[F, 0, 0], [F, 0, 1]], [[F, 1, 0], [F, 1, 1]]]), np.ones((4, 2, 2)))
    assert found.makespan == 3
    assert np.isnan(found.begin[B]).all()


def test_devices_that_wait_for_each_other():
    """An order that cannot run says who waits with what for what."""
    first = [[F, 0, 0], [B, 0, 0], [F, 0, 1], [B, 0, 1]]
    second = [[F, 1, 1], [B, 1, 1], [F, 1, 0], [B, 1, 0]]
    with pytest.raises(DeadlockError) as error:
        simulate(recorded([first, second]), np.ones((4, 2, 2)))
    assert "device 0 waits with B0 of stage 0 for B0 of stage 1" in str(error.value)
    assert "device 1 waits with F1 of stage 1 for F1 of stage 0" in str(error.value)


def test_tasks_that_nobody_runs():
    """A task that needs one that is on no device says so."""
    with pytest.raises(DeadlockError, match="waits with B0 of stage 0 for B0 of stage 1, which no device runs"):
        simulate(recorded([[[F, 0, 0], [B, 0, 0]], [[F, 1, 0], [-1, -1, -1]]]), np.ones((4, 2, 1)))


def test_shapes_are_checked():
    """Times that do not fit the schedule are refused, with both shapes."""
    with pytest.raises(ValueError, match=r"durations must have the shape \(4, 2, 3\).*\(4, 3, 2\)"):
        simulate(gpipe(2, 3), np.ones((4, 3, 2)))
    with pytest.raises(ValueError, match=r"delays must have the shape \(2, 2, 3\)"):
        simulate(gpipe(2, 3), np.ones((4, 2, 3)), delays=np.ones((4, 2, 3)))


def test_large_schedules_take_few_fronts(monkeypatch):
    """The walk over 64 stages and 256 micro-batches is a few operations for each clock, not for each task."""
    module = importlib.import_module("pipesight.schedule.simulation")
    fronts = 0
    real = module._Walk.front

    def counted(walk):
        nonlocal fronts
        fronts += 1
        return real(walk)

    monkeypatch.setattr(module._Walk, "front", counted)
    simulate(gpipe(64, 256), np.ones((4, 1, 1)))
    assert fronts == 2 * (64 + 256 - 1)


# Devices that slow each other down.


def test_one_processor_does_all_of_the_work():
    """On one processor, all devices together take as long as their tasks one after the other, and no longer."""
    schedule = gpipe(3, 4)
    durations = np.random.default_rng(0).uniform(0.5, 1.5, (4, 3, 4, 5))
    found = simulate(schedule, durations, rates=(1.0,))
    work = np.where(np.isnan(found.begin), 0.0, durations).sum(axis=(0, 1, 2))
    assert found.makespan == pytest.approx(work)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zero_bubble])
def test_enough_processors_slow_nobody_down(make):
    """With a rate of 1 for each, or as good as that, tasks run when they would on devices of their own."""
    schedule, draw = make(3, 5), np.random.default_rng(1).uniform
    times, delays, gaps = draw(0.5, 1.5, (4, 3, 5, 3)), draw(0, 0.3, (2, 3, 5, 3)), draw(0, 0.2, 4)
    alone = simulate(schedule, times, delays=delays, gaps=gaps)
    together = simulate(schedule, times, delays=delays, gaps=gaps, rates=(1.0, 1.0, 1 - 1e-13))
    for one, other in ((alone.begin, together.begin), (alone.end, together.end), (alone.busy, together.busy)):
        np.testing.assert_allclose(one, other)


def test_rates_are_found_again():
    """From tasks that ran on fewer processors than there are devices, both rates and work are told."""
    schedule, work = gpipe(4, 8), np.array([1000.0, 0, 2000.0, 0])[:, None, None] * np.ones((4, 4, 8))
    rates = (1.0, 1.0, 0.6, 0.4)
    found = simulate(schedule, work, rates=rates)
    kind, stage, i = schedule.order.reshape(-1, 3).T
    begin, end = (np.rint(times[kind, stage, i])[None].astype(int) for times in (found.begin, found.end))
    told = rates_of(begin, end, (kind * 4 + stage)[None], processors=2)
    assert told == pytest.approx(rates, rel=0.1)
    assert Concurrency(begin, end).work(told)[0] == pytest.approx(work[kind, stage, i], rel=0.15)
