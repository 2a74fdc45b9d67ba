"""The checker flags what cannot run, and messages that block; CSV comes back as it was."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.plan import (
    check_schedule,
    dualpipev,
    gpipe,
    interleaved,
    load_schedule,
    looped_bfs,
    one_f_one_b,
    peak_bytes,
    recorded,
    save_schedule,
    v_half,
    v_min,
    zbv,
    zero_bubble,
)
from pipesight.schedule.csv_format import actions_from_csv, schedule_from_csv, schedule_to_csv
from pipesight.schedule.messages import early_receives, message_problems, with_messages
from pipesight.schedule.task_orders import B, F, Schedule, W

BUILDERS = {
    "gpipe": lambda n, v, m: gpipe(n, m),
    "1f1b": lambda n, v, m: one_f_one_b(n, m),
    "interleaved": lambda n, v, m: interleaved(n * v, m * n, devices=n),
    "looped-bfs": lambda n, v, m: looped_bfs(n * v, m, devices=n),
    "zero-bubble": lambda n, v, m: zero_bubble(n, m),
    "interleaved-zero-bubble": lambda n, v, m: zero_bubble(n * v, m * n, devices=n),
    "zbv-zero-bubble": lambda n, v, m: zbv(2 * n, m),
    "dualpipev": lambda n, v, m: dualpipev(2 * n, m + 2 * n),
    "v-half": lambda n, v, m: v_half(2 * n, m),
    "v-min": lambda n, v, m: v_min(2 * n, m),
}

schedules = st.builds(
    lambda name, n, v, m: BUILDERS[name](n, v, m),
    st.sampled_from([*BUILDERS]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 7),
)


def walked(schedule):
    """Return the most that each device holds, and each stage, by walking along the tasks one by one."""
    devices, stages = [], [0] * schedule.stages
    for row in schedule.order.tolist():
        now, most = dict.fromkeys(range(schedule.stages), 0), 0
        tasks = [tuple(task) for task in row if task[0] >= 0]
        for kind, stage, i in tasks:
            now[stage] += kind == F
            most = max(most, sum(now.values()))
            stages[stage] = max(stages[stage], now[stage]) if kind == F else stages[stage]
            now[stage] -= kind == (W if (W, stage, i) in tasks else B)
        devices.append(most)
    return tuple(devices), tuple(stages)


@settings(deadline=None, max_examples=40)
@given(schedules)
def test_named_schedules_are_right(schedule):
    """Every builder makes a complete order that cannot deadlock, and the checker counts what it holds."""
    found = check_schedule(schedule)
    assert found.runs
    assert found.problems == ()
    assert (found.held, found.held_in_stage) == walked(schedule)


@settings(deadline=None, max_examples=40)
@given(schedules)
def test_csv_comes_back(schedule):
    """What is written as CSV is read as the same order."""
    again = schedule_from_csv(schedule_to_csv(schedule), name=schedule.name)
    assert np.array_equal(again.order, schedule.order)
    assert again.device_of_stage == schedule.device_of_stage
    assert np.array_equal(again.split, schedule.split)


@settings(deadline=None, max_examples=40)
@given(schedules, st.data())
def test_a_task_less_is_noticed(schedule, data):
    """Without any one of its forwards or backwards, a schedule is refused; the stage and the micro-batch are named."""
    order = schedule.order.copy()
    places = np.argwhere((order[..., 0] == F) | (order[..., 0] == B))
    device, place = places[data.draw(st.integers(0, len(places) - 1))]
    kind, stage, i = order[device, place].tolist()
    order[device, place:-1], order[device, -1] = order[device, place + 1 :].copy(), -1
    what = "forward" if kind == F else "backward"
    given = (schedule.stages, schedule.chunks, schedule.device_of_stage, order)
    try:
        found = check_schedule(Schedule("less", *given)).problems
    except ValueError as error:  # what needs it is on the same device
        found = (str(error),)
    words = f"there is no {what} of micro-batch {i} in stage {stage}"
    assert words in found or f"of stage {stage} needs {'FRBW'[kind]}{i}" in found[0]


def test_deadlocks_are_noticed():
    """Devices that wait for each other are named, with what they wait for."""
    crossed = recorded(
        [[[F, 0, 0], [B, 0, 0], [F, 0, 1], [B, 0, 1]], [[F, 1, 1], [B, 1, 1], [F, 1, 0], [B, 1, 0]]], name="crossed"
    )
    found = check_schedule(crossed)
    assert not found.runs
    assert "device 1 waits with F1 of stage 1 for F1 of stage 0" in found.problems[0]
    with pytest.raises(ValueError, match="the schedule cannot run: the devices of 'crossed' wait for each other"):
        found.raise_problems()


INTERLEAVED = """\
0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,\
2B1,2SEND_B1,2REDUCE_GRAD,2RESHARD,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3B0,3SEND_B0,1RECV_B0,3F1,3B1,\
3SEND_B1,1RECV_B1,3REDUCE_GRAD,3RESHARD,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""


def test_receives_that_block_tasks():
    """A receive that stands before a task which could run is flagged, as torch places it for interleaved 1F1B."""
    rows = actions_from_csv(INTERLEAVED)
    schedule = schedule_from_csv(re.sub(r"\d(SEND|RECV)_[FB]\d,", "", INTERLEAVED))
    assert message_problems(rows) == []
    found = [str(early) for early in early_receives(schedule, rows)]
    assert found[0] == "device 0 receives 2RECV_F0 before 0F1, which does not need it"
    assert "device 1 receives 1RECV_B0 before 3F1, which does not need it" in found
    assert check_schedule(schedule).early
    assert check_schedule(gpipe(3, 4)).early == ()
    late = actions_from_csv(INTERLEAVED.replace("2RECV_F0,0F1,0SEND_F1,", "0F1,0SEND_F1,2RECV_F0,"))
    assert "2RECV_F0 before 0F1" not in str([str(early) for early in early_receives(schedule, late)])


@pytest.mark.parametrize(
    ("rows", "stuck"),
    [
        ("0F1,0SEND_F1,2RECV_F0,2F0\n1F0,1SEND_F0,1RECV_F1,1F1", "device 0 with 0SEND_F1, device 1 with 1SEND_F0"),
        (
            "2SEND_F1,0F2,0SEND_F2,2RECV_B0,2B0\n3RECV_F1,3SEND_B0,3F1,3B1,1RECV_F2,1F2",
            "device 0 with 0SEND_F2, device 1 with 3SEND_B0",
        ),
    ],
)
def test_sends_that_wait_for_each_other(rows, stuck):
    """Two devices that send before they receive are flagged: they hang where sends take until they are received."""
    assert message_problems(actions_from_csv(rows)) == [f"devices wait for each other if sends block: {stuck}"]


def test_messages_in_another_order():
    """Messages that are received in another order than they are sent, or never, would be taken for each other."""
    rows = actions_from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0")
    assert message_problems(rows) == [
        "message 0 from device 0 to device 1 is for 1RECV_F0, but is received as 1RECV_F1"
    ]
    rows = actions_from_csv("0F0,0SEND_F0\n1F0")
    assert message_problems(rows) == ["1 messages are sent from device 0 to device 1, but 0 received"]


@settings(deadline=None, max_examples=30)
@given(schedules)
def test_messages_of_schedules(schedule):
    """Every message is sent after its task, received once and before what needs it, in one order on both sides."""
    rows = with_messages(schedule)
    assert not [problem for problem in message_problems(rows) if "if sends block" not in problem]
    for device, row in enumerate(rows):
        at = {str(action): place for place, action in enumerate(row)}
        for s in (s for s, home in enumerate(schedule.device_of_stage) if home == device):
            for i in range(schedule.chunks):
                backward = f"{s}{'I' if schedule.split[s, i] else 'B'}{i}"
                for other, way, task in ((s - 1, "F", f"{s}F{i}"), (s + 1, "B", backward)):
                    apart = 0 <= other < schedule.stages and schedule.device_of_stage[other] != device
                    assert (f"{s}RECV_{way}{i}" in at) == apart
                    assert not apart or at[f"{s}RECV_{way}{i}"] < at[task]


@pytest.mark.parametrize("n", [4, 6, 8])
def test_little_memory(n):
    """V-Half holds about half of what 1F1B does, V-Min about a third, ZBV as much."""
    m = 3 * n

    def held(schedule):
        return peak_bytes(schedule, [0] * 2 * n, [0.5] * 2 * n).max()

    assert held(v_half(2 * n, m)) == n / 2 + 1
    assert n / 3 <= held(v_min(2 * n, m)) <= n / 3 + 4 / 3
    assert held(zbv(2 * n, m)) == n


def test_wrong_files(tmp_path):
    """What is no schedule is refused with the place and what is wrong with it."""
    for text, words in (
        ("0F0,0X0", "line 1, cell 2: '0X0'"),
        ("", "at least one task"),
        ("0F0,0B0\n0F1,0B1", "each stage must be on one device"),
        ("1F0,1B0", "stages must be numbered from 0 without gaps"),
        ("0F0,0B0,0W0", "write I instead of B"),
        ("0F0,0I0", "has no weight gradient"),
        ("0F0,0W0", "has no gradient of the input"),
        ("0F0,0B0,0I0,0W0", "is a whole backward"),
        ("0F999999999,0B999999999", "too few tasks for micro-batch 999999999"),
        ("0F0,0B0\n1F0", "no backward of micro-batch 0 in stage 1"),
        ("0F0,0F0,0B0", "each task must be there once"),
    ):
        (tmp_path / "mine.csv").write_text(text)
        with pytest.raises(ValueError, match=rf"mine\.csv: .*{re.escape(words)}"):
            load_schedule(tmp_path / "mine.csv")
    save_schedule(one_f_one_b(2, 4, recompute=[True] * 4), tmp_path / "ours.csv")
    read = load_schedule(tmp_path / "ours.csv", recompute=[True] * 4)
    assert np.array_equal(read.order, one_f_one_b(2, 4, recompute=[True] * 4).order)
    with pytest.raises(OSError, match=r"none\.csv"):
        load_schedule(tmp_path / "none.csv")
