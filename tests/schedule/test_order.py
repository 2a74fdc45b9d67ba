"""The order of tasks is a right order: each task once, nothing before what it needs, no clock wasted."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipesight import GPipe, context
from pipesight.schedule.task_orders import B, F
from pipesight.schedule.worker_orders import gpipe_tasks
from support.against_plain import Fn, modes, rand

sizes = st.integers(1, 24)


@settings(deadline=None)
@given(m=sizes, n=sizes, data=st.data())
def test_tasks_go_by_the_clock(m, n, data):
    """At clock k, partition j has micro-batch k - j; a worker takes its partitions' tasks so, and back in reverse."""
    share = tuple(j for j in range(n) if data.draw(st.booleans())) or (n - 1,)
    forward = sorted(((i, j) for i in range(m) for j in share), key=lambda task: (sum(task), task[1]))
    assert list(gpipe_tasks(F, m, share)) == forward
    assert list(gpipe_tasks(B, m, share)) == forward[::-1]


@settings(deadline=None)
@given(m=sizes, n=sizes, data=st.data())
def test_workers_never_wait_for_each_other(m, n, data):
    """However partitions are shared out to workers, all tasks get done, each after those it depends on."""
    owner = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    shares = [tuple(j for j in range(n) if owner[j] == worker) for worker in set(owner)]
    for kind, before in ((F, -1), (B, 1)):
        queues = [list(gpipe_tasks(kind, m, share)) for share in shares]
        done: set[tuple[int, int]] = set()
        while any(queues):
            ready = [
                queue
                for queue in queues
                if queue and (not 0 <= queue[0][1] + before < n or (queue[0][0], queue[0][1] + before) in done)
            ]
            assert ready, "every worker waits for another"
            done.add(data.draw(st.sampled_from(ready)).pop(0))
        assert done == {(i, j) for i in range(m) for j in range(n)}


class Diary(context.Observer):
    """Notes every task as it starts and ends."""

    def __init__(self):
        self.tasks = []
        self._lock = threading.Lock()

    def task_started(self, where):
        self._note("start", where)

    def task_ended(self, where):
        self._note("end", where)

    def _note(self, what, where):
        with self._lock:
            self.tasks.append((what, where.phase, where.microbatch, where.partition))


@modes
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (4, 1), (4, 3), (3, 4)])
def test_engine_follows_the_schedule(m, n, checkpoint):
    """The engine runs every task once, in the order of the schedule, and none before what it needs."""
    diary = Diary()
    pipe = GPipe(nn.Sequential(*(Fn(lambda s, x: x * s.a) for _ in range(n))), [1] * n, chunks=m, checkpoint=checkpoint)
    context.attach(diary)
    try:
        pipe(rand(m, 3)).sum().backward()
    finally:
        context.detach(diary)
    at = {entry: k for k, entry in enumerate(diary.tasks)}
    assert len(at) == len(diary.tasks)
    recomputed = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
    for phase, microbatches in (("forward", m), ("backward", m), ("recompute", recomputed)):
        tasks = {(i, j) for what, p, i, j in at if p == phase and what == "end"}
        assert tasks == {(i, j) for i in range(microbatches) for j in range(n)}
    for what, phase, i, j in diary.tasks:
        if what != "start":
            continue
        begin = at[what, phase, i, j]
        assert begin < at["end", phase, i, j]
        if phase == "forward":
            assert j == 0 or at["end", phase, i, j - 1] < begin
            assert i == 0 or at["end", phase, i - 1, j] < begin
        if phase == "backward":
            # The gradient is sent on before those of the parameters are added up.
            assert j == n - 1 or at["start", phase, i, j + 1] < begin
            assert i == m - 1 or at["end", phase, i + 1, j] < begin
            assert i >= recomputed or at["end", "recompute", i, j] < begin


def test_partitions_run_side_by_side():
    """While one partition is at a micro-batch, the one before is at the next: they meet at a barrier."""
    barrier = threading.Barrier(3)

    def meet(s, x):
        where = context.current()
        # Each of these waits for the two others, which run other micro-batches of the same clock.
        if 2 <= where.microbatch + where.partition <= 3 and where.phase == "forward":
            barrier.wait(20)
        return x * s.a

    pipe = GPipe(nn.Sequential(Fn(meet), Fn(meet), Fn(meet)), [1, 1, 1], chunks=4)
    with torch.no_grad():
        pipe(rand(4, 3))
    assert barrier.n_waiting == 0
