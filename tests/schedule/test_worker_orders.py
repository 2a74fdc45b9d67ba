"""What the workers of one process do: schedules by name or as orders, on CPU partitions and GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from pipesight.schedule.supported_schedules import SCHEDULES
from pipesight.schedule.task_orders import B, F, R, W, looped_bfs, one_f_one_b, recorded, zero_bubble
from pipesight.schedule.worker_orders import WorkerOrders, in_flight, name_of, worker_orders

CPU = [None] * 4


def test_each_partition_on_the_cpu_has_a_worker() -> None:
    orders = worker_orders("1f1b", 8, CPU)
    truth = one_f_one_b(4, 8)
    assert orders.homes == (0, 1, 2, 3)
    for row, tasks in zip(truth.order, orders.tasks, strict=True):
        assert [(kind, s, i) for kind, i, s in tasks] == [tuple(task) for task in row.tolist()]
    assert (orders.name, orders.alone, orders.split) == ("1f1b", frozenset(), frozenset())


def test_an_interleaved_schedule_has_two_partitions_for_each_worker() -> None:
    assert worker_orders("interleaved-1f1b", 4, CPU).homes == (0, 1, 0, 1)
    assert worker_orders("interleaved", 4, ["cuda:0", "cuda:1"] * 2).homes == (0, 1, 0, 1)


@pytest.mark.parametrize("name", ["zbv-zero-bubble", "dualpipev", "v-half", "v-min"])
def test_in_a_v_the_first_worker_has_the_last_partition(name: str) -> None:
    assert worker_orders(name, 8, CPU).homes == (0, 1, 1, 0)
    assert worker_orders(name, 8, ["cuda:0", "cuda:1", "cuda:1", "cuda:0"]).homes == (0, 1, 1, 0)
    two_each = [f"cuda:{k}" for k in (0, 0, 1, 1, 1, 1, 0, 0)]
    assert worker_orders(name, 8, two_each).homes == (0, 0, 1, 1, 1, 1, 0, 0)
    assert worker_orders(name, 8, ["cuda:0"] * 4).homes == (0,) * 4  # nothing runs side by side
    with pytest.raises(ValueError, match=r"runs partitions \d, \d on one device, but they are on cuda:\d, cuda:\d"):
        worker_orders(name, 8, ["cuda:0", "cuda:1"] * 2)
    with pytest.raises(ValueError, match=r"needs several partitions on each worker.*\(partitions: 3\)"):
        worker_orders(name, 8, [None] * 3)


def test_an_odd_number_of_partitions_in_a_loop() -> None:
    assert worker_orders("looped-bfs", 2, ["cuda:0", "cuda:1", "cuda:2"] * 3).homes == (0, 1, 2) * 3


def test_neighbours_on_one_gpu_are_run_as_one() -> None:
    """A micro-batch goes through all of them, forward and backward, before the next has its turn."""
    orders = worker_orders("1f1b", 2, ["cuda:0"] * 3)
    once = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)]
    assert orders.tasks == (tuple((kind, i, s) for i in range(2) for kind, s in once),)
    assert (orders.alone, orders.flying) == ({0, 1}, 0)
    two = worker_orders("zero-bubble", 2, ["cuda:0", "cuda:0", "cuda:1"])
    assert two.homes == (0, 0, 1)
    assert two.tasks[0][:2] == ((F, 0, 0), (F, 0, 1))
    assert two.split == {(i, s) for i in range(2) for s in range(3)}


def test_partitions_that_come_back_to_a_gpu_share_its_worker() -> None:
    orders = worker_orders("1f1b", 4, ["cuda:0", "cuda:1", "cuda:0"])
    assert orders.homes == (0, 1, 0)
    assert {s for _, _, s in orders.tasks[0]} == {0, 2}


def test_recomputations_come_before_their_backwards() -> None:
    orders = worker_orders("1f1b", 2, [None] * 2, recompute=[True, False])
    assert orders.tasks[1] == ((F, 0, 1), (R, 0, 1), (B, 0, 1), (F, 1, 1), (B, 1, 1))
    own = zero_bubble(2, 2, recompute=[False, True])
    again = worker_orders(own, 2, [None] * 2, recompute=[True, True])  # the order says itself when
    assert sum(kind == R for row in again.tasks for kind, _, _ in row) == 2


ONE_EACH = ["gpipe", "1f1b", "zero-bubble"]
SEVERAL = ["interleaved-1f1b", "looped-bfs", "zbv-zero-bubble", "v-min"]


@pytest.mark.parametrize(
    ("name", "n"), [(name, n) for name in ONE_EACH + SEVERAL for n in (2, 4, 6) if n > 2 or name in ONE_EACH]
)
def test_no_worker_waits_for_a_thread(name: str, n: int) -> None:
    """With as many threads as there are, each busy from first forward to last, a step is as short as with more."""
    orders = worker_orders(name, 8, [None] * n)
    assert makespan(orders, orders.flying) == makespan(orders, 8)
    if name in ONE_EACH and n > 2:
        assert makespan(orders, 1) > makespan(orders, 8)


def makespan(orders: WorkerOrders, threads: int) -> float:
    """Run all tasks, forwards twice as fast as backwards, with so many threads that run the model."""
    stages, at, free = len(orders.homes), [0] * len(orders.tasks), [0.0] * len(orders.tasks)
    end: dict[tuple[int, int, int], float] = {}
    pool = [0.0] * threads  # when each thread is free
    started: dict[int, int] = {}
    while any(k < len(row) for k, row in zip(at, orders.tasks, strict=True)):
        ready = []
        for d, row in enumerate(orders.tasks):
            if at[d] < len(row):
                kind, i, s = row[at[d]]
                needs = {F: (F, i, s - 1), B: (B, i, s + 1), W: (B, i, s)}[kind]
                needs = (F, i, s) if kind == B and s == stages - 1 else needs
                first = kind == F and s == 0
                if first or needs in end:
                    there = min(pool) if first else end[needs]
                    ready.append((max(free[d], there), d, kind, i, s))
        begin, d, kind, i, s = min(ready)
        split = (i, s) in orders.split
        end[kind, i, s] = free[d] = begin + (2.0 if kind == B and not split else 1.0)
        at[d] += 1
        if kind == F and s == 0:
            started[i] = pool.index(min(pool))
            pool[started[i]] = float("inf")
        if kind == F and s == stages - 1:
            pool[started[i]] = end[kind, i, s]
    return max(free)


def test_all_micro_batches_may_have_to_be_under_way() -> None:
    """A worker that runs all of them in its first partition before any in its next."""
    assert in_flight(looped_bfs(4, 5, devices=2)) == 5


def test_an_order_must_be_complete_and_able_to_run() -> None:
    whole = one_f_one_b(2, 2).order
    assert worker_orders(recorded(whole), 2, [None] * 2).name == "recorded"
    missing = whole.copy()
    missing[1, 3:] = -1
    with pytest.raises(ValueError, match="there is no backward of micro-batch 1 in stage 1"):
        worker_orders(recorded(missing), 2, [None] * 2)
    stuck = np.array([[[F, 0, 0], [B, 0, 0], [F, 0, 1], [B, 0, 1]], [[F, 1, 1], [B, 1, 1], [F, 1, 0], [B, 1, 0]]])
    with pytest.raises(ValueError, match="wait"):
        worker_orders(recorded(stuck), 2, [None] * 2)
    with pytest.raises(ValueError, match=r"as many stages as the pipeline has partitions \(stages: 2, partitions: 3\)"):
        worker_orders(recorded(whole), 2, [None] * 3)


def test_a_device_of_an_order_is_one_device() -> None:
    order = worker_orders("interleaved-1f1b", 4, CPU)
    assert order.homes == (0, 1, 0, 1)
    with pytest.raises(ValueError, match=r"runs partitions 0, 3 on one device, but they are on cuda:0, cuda:1"):
        worker_orders("interleaved-1f1b", 6, [f"cuda:{k}" for k in (0, 1, 2, 1, 0, 2)])


def test_order_of_another_number_of_micro_batches() -> None:
    """The same gradients come from a stand-in."""
    orders = worker_orders(one_f_one_b(2, 8), 3, [None] * 2)
    assert {i for row in orders.tasks for _, i, _ in row} == {0, 1, 2}


def test_names() -> None:
    assert name_of("Zero_Bubble") == "zero-bubble"
    assert name_of("ScheduleZBVZeroBubble") == "zbv-zero-bubble"
    for over_ranks in SCHEDULES:
        assert name_of(over_ranks.name) == over_ranks.name
    assert name_of(zero_bubble(2, 2)) == "zero-bubble"
    with pytest.raises(ValueError, match=r"schedule must be one of 'gpipe', '1f1b', .*schedule: 'fast'"):
        name_of("fast")
    assert W in {kind for row in worker_orders("zero-bubble", 2, CPU).tasks for kind, _, _ in row}
