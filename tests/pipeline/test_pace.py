"""Brief tasks: workers take turns, and nothing else changes."""

import threading
import time

import torch
from torch import nn

from pipesight import GPipe
from pipesight.pipeline.workers import Pace
from support.against_plain import assert_same


class Call(nn.Module):
    """Calls a function, then passes its input on."""

    def __init__(self, function=lambda: None):
        super().__init__()
        self.function = function

    def forward(self, input):
        self.function()
        return input


def pipe_of(*functions, chunks):
    return GPipe(nn.Sequential(*map(Call, functions)), [1] * len(functions), devices=["cpu"] * 9, chunks=chunks)


def force_turns(pipe):
    """Make the next passes of a pipeline run in turns, whatever the machine does."""
    for pace in (workers := pipe._engine().workers).forward_pace, workers.backward_pace:
        pace.in_turns = True
        pace.learn = lambda seconds, in_turns: None


def test_pace_tries_turns_and_keeps_what_is_brief():
    """Turns are tried after a pass that may be brief, kept if it was, and not tried again soon if it was not."""
    pace = Pace()
    pace.learn(1e-3, in_turns=False)
    assert not pace.in_turns
    pace.learn(150e-6, in_turns=False)
    assert pace.in_turns
    pace.learn(50e-6, in_turns=True)
    assert pace.in_turns
    pace.learn(150e-6, in_turns=True)
    assert pace.in_turns  # once is no rule
    for _ in range(10):
        pace.learn(150e-6, in_turns=True)
    assert not pace.in_turns
    passes = 0
    while not pace.in_turns:
        pace.learn(150e-6, in_turns=False)
        passes += 1
    assert passes > 10


def test_one_worker_at_a_time():
    """In turns, a worker is done with all micro-batches before the next begins."""
    order = []
    pipe = pipe_of(lambda: order.append(0), lambda: order.append(1), chunks=8)
    force_turns(pipe)
    for _ in range(20):  # a pass that the machine disturbs gives up turns
        order.clear()
        pipe(torch.randn(8, 1))
        if order == [0] * 8 + [1] * 8:
            return
    raise AssertionError(order)


def test_same_gradients_in_turns():
    """Turns change no number."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    for checkpoint in ("never", "except_last", "always"):
        pipe = GPipe(model, [2, 1, 2], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint)
        results = []
        for turns in (False, True):
            if turns:
                force_turns(pipe)
            torch.manual_seed(0)
            pipe.zero_grad()
            output = pipe(torch.linspace(-1, 1, 32).view(8, 4))
            output.square().sum().backward()
            results.append([output.detach(), *(p.grad.clone() for p in pipe.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_brief_tasks_against_the_plain_model():
    """The numbers stay right while the engine finds its pace."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert_same(model, torch.randn(8, 3, requires_grad=True), [1, 1], chunks=4, checkpoint="except_last", passes=20)


def test_layer_that_waits_for_a_later_partition():
    """A layer of a brief pipeline that suddenly waits for a later partition holds nothing back from it for long."""
    reached = threading.Event()
    calls = []

    def wait():
        calls.append(None)
        if len(calls) > 1:
            assert reached.wait(timeout=30)

    pipe = pipe_of(wait, reached.set, chunks=2)
    force_turns(pipe)
    pipe(torch.randn(2, 1))
    assert len(calls) == 2


def test_layers_that_sleep_stay_side_by_side():
    """Time asleep is no work, but it is no brief task either."""
    pipe = pipe_of(*[lambda: time.sleep(2e-3)] * 3, chunks=6)
    for _ in range(4):
        pipe(torch.randn(6, 1))
    assert not pipe._engine().workers.forward_pace.in_turns


def test_turns_end_where_tasks_take_long():
    """A pass that turns out to be long stops taking turns midway."""
    order = []

    def slow():
        time.sleep(5e-3)
        order.append(0)

    pipe = pipe_of(slow, lambda: order.append(1), chunks=8)
    force_turns(pipe)
    pipe(torch.randn(8, 1))
    assert order != [0] * 8 + [1] * 8
    assert sorted(order) == [0] * 8 + [1] * 8
