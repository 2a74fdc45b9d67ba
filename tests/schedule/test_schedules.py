"""Schedules: their orders, each task once, and no device that holds more than it should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.plan import Schedule, gpipe, interleaved, one_f_one_b, recomputed, recorded, zero_bubble
from pipesight.schedule.task_orders import KINDS, B, F, R, W


def tasks(schedule, device):
    return [tuple(task) for task in schedule.order[device].tolist() if task[0] >= 0]


def words(schedule, device):
    return " ".join(f"{KINDS[kind]}{i}" for kind, _, i in tasks(schedule, device))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 6), st.data())
def test_gpipe_goes_by_the_clock(homes, m, data):
    """At clock k, stage s runs micro-batch k - s; backwards come in reverse, with recomputations before them."""
    homes = [sorted({*homes}).index(home) for home in homes]
    again = data.draw(st.lists(st.booleans(), min_size=m, max_size=m))
    schedule = gpipe(len(homes), m, recompute=again, device_of_stage=homes)
    for device in range(max(homes) + 1):
        mine = [s for s, home in enumerate(homes) if home == device]
        forward = [(s, k - s) for k in range(m + len(homes)) for s in mine if 0 <= k - s < m]
        expected = [(F, s, i) for s, i in forward]
        for s, i in reversed(forward):
            expected += [(R, s, i), (B, s, i)] if again[i] else [(B, s, i)]
        assert tasks(schedule, device) == expected


def test_one_f_one_b_takes_turns():
    """The last stage alternates from the start; each one before it runs one more forward ahead."""
    schedule = one_f_one_b(3, 4)
    assert words(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert words(one_f_one_b(3, 2, recompute=[True, False]), 0) == "F0 F1 R0 B0 B1"


def test_zero_bubble_puts_weights_off():
    """Each stage puts off the gradients of the weights of as many micro-batches as there are stages before it."""
    schedule = zero_bubble(3, 4)
    assert words(schedule, 0) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert words(schedule, 2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    assert words(zero_bubble(3, 1), 2) == "F0 B0 W0"


def test_interleaved_comes_around():
    """A group of micro-batches passes all stages of a device before the next group; backwards come in reverse."""
    schedule = interleaved(4, 4, devices=2)
    assert schedule.device_of_stage == (0, 1, 0, 1)
    forwards = [(s, i) for kind, s, i in tasks(schedule, 0) if kind == F]
    backwards = [(s, i) for kind, s, i in tasks(schedule, 0) if kind == B]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert backwards == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_every_task_is_there_once(n, groups, rounds):
    """All schedules run all tasks, each once."""
    m = n * groups
    for schedule in (
        gpipe(n, m),
        one_f_one_b(n, m),
        zero_bubble(n, m),
        interleaved(n * rounds, m, devices=n),
        one_f_one_b(n, m, device_of_stage=[0] * n),
    ):
        kinds = (F, B, W) if schedule.name == "zero-bubble" else (F, B)
        everything = {(k, s, i) for k in kinds for s in range(schedule.stages) for i in range(m)}
        found = [task for device in range(schedule.devices) for task in tasks(schedule, device)]
        assert len(found) == len(everything) == schedule.tasks
        assert {*found} == everything


def under_way(schedule, device, until):
    """How many micro-batches a device holds at once, each from its forward on."""
    held = most = 0
    for kind, _, _ in tasks(schedule, device):
        held += (kind == F) - (kind == until)
        most = max(most, held)
    return most


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 8))
def test_few_micro_batches_are_under_way(n, m):
    """1F1B holds one micro-batch more for each stage to come; zero-bubble never more than its first stage."""
    for s in range(n):
        assert under_way(one_f_one_b(n, m), s, B) == min(m, n - s)
        assert under_way(zero_bubble(n, m), s, W) <= min(m, n)
        assert under_way(gpipe(n, m), s, B) == m


@pytest.mark.parametrize(
    ("mode", "flags"),
    [("always", (True, True)), ("except_last", (True, False)), ("never", (False, False))],
)
def test_checkpoint_modes(mode, flags):
    """The flags are those of the engine's modes."""
    assert recomputed(mode, 2) == flags
    with pytest.raises(ValueError, match="not one of 'always', 'except_last', or 'never'"):
        recomputed("sometimes", 2)


def test_recorded_finds_devices():
    """Of an order that was observed, stages, micro-batches and devices are found."""
    schedule = gpipe(3, 2, device_of_stage=[0, 1, 0])
    again = recorded(schedule.order, joined=True)
    assert (again.stages, again.chunks, again.device_of_stage) == (3, 2, (0, 1, 0))
    assert (again.order == schedule.order).all()
    assert again.joined


def test_wrong_orders_are_refused():
    """A task that is there twice, on two devices, before what it needs, or beyond the limits is named."""
    with pytest.raises(ValueError, match="needs F0, which must come before"):
        recorded([[[B, 0, 0], [F, 0, 0]]])
    with pytest.raises(ValueError, match="needs R0, which must come before"):
        recorded([[[F, 0, 0], [B, 0, 0], [R, 0, 0]]])
    with pytest.raises(ValueError, match="once"):
        recorded([[[F, 0, 0], [F, 0, 0]]])
    with pytest.raises(ValueError, match="each stage on one device"):
        recorded([[[F, 0, 0]], [[F, 0, 1]]])
    with pytest.raises(ValueError, match="shape"):
        recorded([[F, 0, 0]])
    with pytest.raises(ValueError, match="must have at least one task"):
        recorded(np.full((1, 2, 3), -1))
    with pytest.raises(ValueError, match="before the -1"):
        recorded([[[-1, -1, -1], [F, 0, 0]]])
    with pytest.raises(ValueError, match="beyond the chunks"):
        Schedule("mine", 1, 1, (0,), np.array([[[F, 0, 1]]], np.int32))


def test_wrong_numbers_are_refused():
    """Numbers that make no schedule are named, with the rule."""
    with pytest.raises(ValueError, match="positive"):
        gpipe(0, 1)
    with pytest.raises(ValueError, match="stages must be a multiple of devices"):
        interleaved(3, 4, devices=2)
    with pytest.raises(ValueError, match="chunks must come in equally large groups"):
        interleaved(4, 5, devices=2)
    with pytest.raises(ValueError, match="a flag for each micro-batch"):
        gpipe(2, 3, recompute=[True])
    with pytest.raises(ValueError, match="each stage must have a device"):
        gpipe(2, 3, device_of_stage=[0, 2])
