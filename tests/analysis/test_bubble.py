"""The bubble is exact, and what is lost has its name: busy and losses add up to the window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesight.analysis.bubble_losses import LOSSES, WindowSplit, split_windows
from pipesight.analysis.step_grouping import INCOMPLETE, find_minibatches
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, RECOMPUTE
from pipesight.runs.reading.event_tables import Tasks, Transfers
from pipesight.runs.reading.run import open_run
from pipesight.schedule.task_orders import Schedule, gpipe, interleaved, one_f_one_b
from support.synthetic import Made

Durations = Callable[[int, int, int, int], int]  # of a task, by mini-batch, phase, partition and micro-batch


def tasks_of(rows: Sequence[tuple[int, int, int, int, int, int]]) -> Tasks:
    """Make a table of (mini-batch, partition, micro-batch, phase, begin, end)."""
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    zero = np.zeros(len(rows), np.int64)
    return Tasks(zero, columns[0], columns[0], *columns[1:], zero - 1)


def transfers_of(rows: Sequence[tuple[int, int, int, int, int]]) -> Transfers:
    """Make a table of (mini-batch, partition, micro-batch, begin, end)."""
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    zero = np.zeros(len(rows), np.int64)
    return Transfers(zero, columns[0], columns[0], *columns[1:], zero)


def play(
    schedule: Schedule,
    times: Durations,
    *,
    minibatches: int = 1,
    gap: Durations = lambda *_: 0,
    transfer: Durations = lambda *_: 0,
) -> tuple[Tasks, Transfers]:
    """Run a schedule task by task, with a gap before each task, and a transfer between partitions."""
    tasks, transfers, at = [], [], 0
    for b in range(minibatches):
        queues = [[tuple(task) for task in row.tolist() if task[0] >= 0] for row in schedule.order]
        free, ends = [at] * len(queues), {}
        while any(queues):
            for device, queue in enumerate(queues):
                if not queue:
                    continue
                kind, j, i = queue[0]
                before = {FORWARD: (FORWARD, j - 1, i), BACKWARD: (BACKWARD, j + 1, i)}.get(kind)
                if before is not None and not 0 <= before[1] < schedule.stages:
                    before = None
                if before is not None and before not in ends:
                    continue
                ready = at
                if before is not None:
                    took = transfer(b, kind, j, i)
                    ready = ends[before] + took
                    if took:
                        transfers.append((b, j, i, ends[before], ready))
                begin = max(free[device], ready) + gap(b, kind, j, i)
                ends[kind, j, i] = free[device] = begin + times(b, kind, j, i)
                tasks.append((b, j, i, kind, begin, free[device]))
                queue.pop(0)
        at = max(free) + 10
    return tasks_of(tasks), transfers_of(transfers)


def split(tasks: Tasks, transfers: Transfers | None = None, **options) -> WindowSplit:
    """WindowSplit the windows of mini-batches that all have the same tasks."""
    minibatches, tasks = find_minibatches(tasks)
    complete = minibatches.where(minibatches.kind != INCOMPLETE)
    (found,) = split_windows(complete, tasks, transfers_of([]) if transfers is None else transfers, **options)
    return found


def lost(found: WindowSplit) -> dict[str, int]:
    """Return the losses that there are, as the sum over mini-batches and partitions."""
    return {name: int(loss.sum()) for name, loss in zip(LOSSES, found.losses, strict=True) if loss.any()}


def check(found: WindowSplit) -> None:
    assert (found.losses >= 0).all()
    assert (found.busy >= 0).all()
    assert (found.busy + found.losses.sum(axis=0) == found.window[:, None]).all()
    assert (found.worker_losses >= 0).all()
    assert (found.worker_busy >= 0).all()
    assert (found.worker_busy + found.worker_losses.sum(axis=0) == found.window[:, None]).all()
    assert ((found.bound >= 0) & (found.bound <= 1)).all()


even = {FORWARD: 100, RECOMPUTE: 100, BACKWARD: 200}


# Adding up.


@st.composite
def played(draw, *, gaps: bool, transfers: bool):
    n, m, b = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    recompute = draw(st.lists(st.booleans(), min_size=m, max_size=m))
    make = draw(st.sampled_from([gpipe, one_f_one_b]))
    homes = draw(st.sampled_from([list(range(n)), [0] * n, [j // 2 for j in range(n)]]))
    seed = draw(st.integers(0, 2**32))
    times, pauses, moves = (
        np.random.default_rng([seed, k]).integers(low, high, (b, 4, n, m))
        for k, (low, high) in enumerate([(1, 1000), (0, 200), (0, 300)])
    )
    schedule = make(n, m, recompute=recompute, device_of_stage=homes)
    return play(
        schedule,
        lambda *at: int(times[at]),
        minibatches=b,
        gap=lambda *at: int(pauses[at]) if gaps else 0,
        transfer=lambda *at: int(moves[at]) if transfers else 0,
    ), homes


@given(played(gaps=True, transfers=True))
@settings(deadline=None, max_examples=60)
def test_busy_and_losses_add_up(run):
    """In any schedule, with any times, gaps and transfers, busy + losses = window, exactly, and none is negative."""
    (tasks, transfers), homes = run
    found = split(tasks, transfers, devices=lambda _: homes)
    check(found)
    for row, b in enumerate(np.unique(tasks.minibatch)):
        own = tasks.where(tasks.minibatch == b)
        assert found.window[row] == own.end.max() - own.begin.min()
        for j in range(len(homes)):
            mine = own.where(own.partition == j)
            assert found.busy[row, j] == (mine.end - mine.begin).sum()


@pytest.mark.slow
@given(played(gaps=True, transfers=True))
@settings(deadline=None, max_examples=60)
def test_busy_and_losses_of_ranks_add_up(run):
    """Of ranks with several partitions likewise; each is as busy as these are together, and has nothing to share."""
    (tasks, transfers), homes = run
    found = split(tasks, transfers, devices=lambda _: homes, workers=lambda _: homes)
    check(found)
    for worker in {*homes}:
        mine = [j for j, home in enumerate(homes) if home == worker]
        assert found.worker_busy[:, worker].tolist() == found.busy[:, mine].sum(axis=1).tolist()
    assert not found.worker_losses[LOSSES.index("sharing")].any()


@given(played(gaps=False, transfers=False))
@settings(deadline=None, max_examples=40)
def test_no_gap_without_one(run):
    """Where devices never pause between tasks, there are no host gaps, and no transfers either."""
    (tasks, transfers), homes = run
    assert {"host_gaps", "transfers"}.isdisjoint(lost(split(tasks, transfers, devices=lambda _: homes)))


@given(played(gaps=False, transfers=True))
@settings(deadline=None, max_examples=40)
def test_transfers_explain_what_they_delay(run):
    """Where devices wait for transfers only, there are no host gaps."""
    (tasks, transfers), homes = run
    assert "host_gaps" not in lost(split(tasks, transfers, devices=lambda _: homes))


@given(
    st.integers(1, 3).flatmap(
        lambda n: st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), min_size=4 * n, max_size=4 * n).map(
            lambda spans: (n, spans)
        )
    )
)
@settings(deadline=None, max_examples=60)
def test_impossible_times_add_up(run):
    """Tasks that overlap, or run before what they need, are odd, but their times still add up."""
    n, spans = run
    places = [(j, i, phase) for phase in (FORWARD, BACKWARD) for j in range(n) for i in range(2)]
    rows = [(0, *place, begin, begin + length) for place, (begin, length) in zip(places, spans, strict=True)]
    found = split(tasks_of(rows))
    check(found)
    for j in range(n):
        moments = {t for row in rows if row[1] == j for t in range(row[4], row[5])}
        assert found.busy[0, j] == len(moments)
    together = split(tasks_of(rows), devices=lambda _: [0] * n, workers=lambda _: [0] * n)
    check(together)
    assert together.worker_busy.tolist() == [[len({t for row in rows for t in range(row[4], row[5])})]]


def test_many_orders_add_up():
    """Mini-batches that each run in an order of their own are split too."""
    rng = np.random.default_rng(0)
    rows = []
    for b in range(80):
        at = b * 10_000
        for phase in (FORWARD, BACKWARD):
            for j in range(2):
                for i in rng.permutation(4).tolist():
                    rows.append((b, j, i, phase, at, at + 10))
                    at += 10
    found = split(tasks_of(rows))
    check(found)
    assert len(found.rows) == 80


# Exact numbers.


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 8), (8, 3)])
def test_bound_is_met(n, m):
    """With tasks of equal length, the bubble is (n - 1) / (m + n - 1), and all of it is fill and drain."""
    tasks, _ = play(gpipe(n, m), lambda _, phase, *__: even[phase], minibatches=3)
    found = split(tasks)
    assert found.bubble == pytest.approx(np.full((3, n), (n - 1) / (m + n - 1)))
    assert found.bound == pytest.approx(np.full(3, (n - 1) / (m + n - 1)))
    assert lost(found) == ({"fill_and_drain": 3 * n * (n - 1) * 300} if n > 1 else {})


def test_synthetic_run_is_exact(tmp_path: Path):
    """From the files of a run with known times, the bubble comes out exactly."""
    made = Made(tmp_path / "run", balance=[1, 1, 1], chunks=2)
    end = made.gpipe(0, lambda phase, i, j: {"forward": 10, "backward": 20}[phase] * (j + 1))
    with open_run(made.write()) as run:
        found = split(run.tasks())
    assert end == 10 + 20 + 2 * 30 + 2 * 60 + 40 + 20
    assert found.window.tolist() == [270]
    assert found.busy.tolist() == [[60, 120, 180]]
    assert found.bubble[0] == pytest.approx([1 - 60 / 270, 1 - 120 / 270, 1 - 180 / 270])
    check(found)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_steps_of_different_length_have_no_jitter(schedule):
    """A mini-batch that takes twice as long in every task has twice the fill and drain, and no other loss."""
    tasks, _ = play(schedule(3, 6), lambda b, phase, *_: even[phase] * (b + 1), minibatches=4)
    found = split(tasks)
    assert set(lost(found)) == {"fill_and_drain"}
    assert found.bound == pytest.approx([found.bound[0]] * 4)


# Each loss under its name.


def fill_and_drain(n: int = 4) -> int:
    return n * (n - 1) * 300


def test_imbalance_has_its_name():
    """A partition that is slower in every step is imbalance: the others wait for it."""
    tasks, _ = play(gpipe(4, 4), lambda _, phase, j, __: even[phase] * (2 if j == 1 else 1), minibatches=2)
    found = split(tasks)
    assert set(lost(found)) == {"fill_and_drain", "imbalance"}
    assert found.losses[LOSSES.index("imbalance"), 0, 1] == 0
    assert (found.losses[LOSSES.index("imbalance"), 0, [0, 2, 3]] > 0).all()


def test_jitter_has_its_name():
    """A task that is late once is jitter, and takes nothing from what the schedule loses."""
    late = lambda b, phase, j, i: 70 * ((b, phase, j, i) == (1, FORWARD, 3, 3))
    tasks, _ = play(gpipe(4, 4), lambda *at: even[at[1]] + late(*at), minibatches=3)
    found = split(tasks)
    assert lost(found) == {"fill_and_drain": 3 * fill_and_drain(), "jitter": 3 * 70}
    assert found.losses[LOSSES.index("jitter")].tolist() == [[0] * 4, [70, 70, 70, 0], [0] * 4]


def test_transfers_have_their_name():
    """The time that tensors take to the next partition is lost to transfers."""
    tasks, transfers = play(gpipe(4, 4), lambda _, phase, *__: even[phase], transfer=lambda *_: 25)
    found = split(tasks, transfers)
    assert lost(found) == {"fill_and_drain": fill_and_drain(), "transfers": 4 * 6 * 25}  # 3 down, 3 up


def test_transfers_between_tasks_have_their_name():
    """A device that moves tensors itself, before each task, loses that time to transfers, not to gaps."""
    tasks, _ = play(gpipe(2, 3), lambda _, phase, *__: even[phase], gap=lambda _, kind, j, i: 30 * (j == 1))
    moved = tasks.where(tasks.partition == 1)
    rows = zip(moved.minibatch, moved.partition, moved.microbatch, moved.begin - 30, moved.begin, strict=True)
    found = split(tasks, transfers_of([tuple(map(int, row)) for row in rows]))
    assert "host_gaps" not in lost(found)
    assert lost(found)["transfers"] > 0


def test_host_gaps_have_their_name():
    """The time from the end of a task to the next that could have begun is a host gap."""
    tasks, _ = play(gpipe(4, 4), lambda _, phase, *__: even[phase], gap=lambda _, kind, j, i: 15 * (j == 3))
    assert lost(split(tasks)) == {"fill_and_drain": fill_and_drain(), "host_gaps": 4 * 8 * 15}


def test_turnaround_is_a_host_gap():
    """What lies between the last forward and the first backward is a part of the host gaps."""
    first = (BACKWARD, 3, 3)
    tasks, _ = play(gpipe(4, 4), lambda _, phase, *__: even[phase], gap=lambda _, *at: 90 * (at == first))
    found = split(tasks)
    assert lost(found)["host_gaps"] == 4 * 90
    assert found.turnaround.tolist() == [90]


def test_sharing_has_its_name():
    """Partitions that take turns on one device lose time to sharing it."""
    homes = [0, 0]
    tasks, _ = play(gpipe(2, 4, device_of_stage=homes), lambda _, phase, *__: even[phase])
    found = split(tasks, devices=lambda _: homes)
    # Apart: 5 clocks of 300 of which a partition is busy 4; together: 8 of them.
    assert lost(found) == {"fill_and_drain": 2 * 300, "sharing": 2 * 3 * 300}
    assert found.bound == pytest.approx([0.2])


def test_ranks_that_take_turns_share_nothing():
    """A rank that has several partitions is busy with any of them; its bubble is what the schedule leaves it idle."""
    schedule = interleaved(4, 8, devices=2)
    tasks, _ = play(schedule, lambda _, phase, *__: even[phase])
    found = split(tasks, devices=lambda _: [0, 1, 0, 1], workers=lambda _: [0, 1, 0, 1])
    check(found)
    # (p - 1) / (v m + p - 1), with v partitions on each of p ranks.
    assert found.bound == pytest.approx([1 / 17])
    assert found.worker_busy.tolist() == [[2 * 8 * 300] * 2]
    named = {name: loss.tolist() for name, loss in zip(LOSSES, found.worker_losses[:, 0], strict=True) if loss.any()}
    assert named == {"fill_and_drain": [300] * 2}
    assert found.losses[LOSSES.index("sharing")].all()  # to each partition still


def test_recomputation_is_computing():
    """Recomputed tasks count as busy; what starts early, while the gradient is on its way, lowers the bound."""
    tasks, _ = play(gpipe(4, 4, recompute=[True] * 3 + [False]), lambda _, phase, *__: even[phase])
    found = split(tasks)
    assert found.busy.tolist() == [[4 * 300 + 3 * 100] * 4]
    assert found.phases[RECOMPUTE].tolist() == [[300] * 4]
    assert set(lost(found)) == {"fill_and_drain"}
    assert found.bound[0] < 3 / 7


# What is missing.


def test_evaluation_has_a_bubble():
    """A mini-batch without backward has a window too: that of its forwards."""
    tasks, _ = play(gpipe(3, 2), lambda _, phase, *__: even[phase])
    found = split(tasks.where(tasks.phase == FORWARD))
    assert found.window.tolist() == [400]
    assert found.bubble[0] == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("without", [[0], [1], [0, 1]])
def test_partitions_without_backward(without):
    """Partitions that learn nothing, or whose backward another one runs, have none; the rest still adds up."""
    tasks, _ = play(gpipe(3, 4), lambda _, phase, *__: even[phase])
    found = split(tasks.where((tasks.phase == FORWARD) | ~np.isin(tasks.partition, without)))
    check(found)
    assert found.schedule is not None


def test_no_minibatch():
    """Without mini-batches there is nothing to split."""
    minibatches, tasks = find_minibatches(tasks_of([]))
    assert split_windows(minibatches, tasks, transfers_of([])) == []
