"""The context tells where the running code is, and its observers are told when that changes."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from pipesight import GPipe, context, current_microbatch, is_checkpointing, is_recomputing
from pipesight.context import Observer, Observers, Where
from pipesight.pipeline.gradients import GradientSum
from support.against_plain import Fn, assert_same_state, modes, rand, total


class Recorder(Observer):
    """Keeps what it is told: (event, step, partition, micro-batch, phase, layer)."""

    def __init__(self):
        self.events = []

    def _keep(self, event, where):
        self.events.append((event, where.step, where.partition, where.microbatch, where.phase, where.layer))

    def task_started(self, where):
        self._keep("task_started", where)

    def task_ended(self, where):
        self._keep("task_ended", where)

    def layer_started(self, where):
        self._keep("layer_started", where)

    def layer_ended(self, where):
        self._keep("layer_ended", where)

    def of(self, j, *phases):
        """Return the events of partition j as (event, micro-batch, phase, layer)."""
        return [(e, i, p, layer) for e, _, jj, i, p, layer in self.events if jj == j and p in phases]


@contextmanager
def attached(observer):
    context.attach(observer)
    try:
        yield observer
    finally:
        context.detach(observer)


@pytest.fixture
def recorder():
    with attached(Recorder()) as observer:
        yield observer


class Probe(nn.Linear):
    """Writes down what the context says while it runs."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = []

    def forward(self, input):
        where = context.current()
        place = (where.step, where.partition, where.microbatch, where.microbatches, where.phase, where.layer)
        self.seen.append((*place, is_checkpointing(), is_recomputing()))
        return super().forward(input)


def pipeline(*layers, balance, chunks=2, checkpoint="never"):
    torch.manual_seed(0)
    return GPipe(nn.Sequential(*layers), balance, chunks=chunks, checkpoint=checkpoint)


def four_layers(**options):
    return pipeline(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), balance=[2, 2], **options)


def train(model):
    model(torch.ones(12, 4)).sum().backward()


def task(i, phase, layers):
    """Return the events of one task."""
    inside = [(event, i, phase, layer) for layer in layers for event in ("layer_started", "layer_ended")]
    return [("task_started", i, phase, None), *inside, ("task_ended", i, phase, layers[-1])]


def test_outside_of_a_partition_there_is_no_place():
    """Outside of a partition the context is empty."""
    assert context.current() is None
    assert current_microbatch() is None
    assert not is_checkpointing()
    assert not is_recomputing()


def test_place_of_a_running_layer():
    """A layer sees step, partition, micro-batch, phase and its own name; checkpointed tasks run twice."""
    probe = Probe()
    model = pipeline(nn.Linear(4, 4), probe, balance=[1, 1], chunks=3, checkpoint="except_last")
    train(model)
    train(model)
    assert probe.seen == [
        (step, 1, i, 3, phase, "1", phase == "forward" and i < 2, phase == "recompute")
        for step in (0, 1)
        for phase, order in (("forward", [0, 1, 2]), ("recompute", [1, 0]))
        for i in order
    ]


def test_steps_count_training_passes_only():
    """An evaluation between two steps bears the number of the step to come, and uses none up."""
    probe = Probe()
    model = pipeline(probe, balance=[1], chunks=1)
    train(model)
    with torch.no_grad():
        model.eval()(torch.ones(4, 4))
    train(model.train())
    assert [step for step, *_ in probe.seen] == [0, 1, 1]


def test_place_ends_with_the_pass():
    """A place that a thread keeps says, once the pass is over, that nothing is running."""
    places = []

    class Keep(nn.Linear):
        def forward(self, input):
            places.append(context.current())
            return super().forward(input)

    train(pipeline(Keep(4, 4), balance=[1], chunks=1))
    assert places[0].phase is None
    assert "phase=None" in repr(places[0])


class Ask(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.tokens = []

    def forward(self, input):
        self.tokens.append(current_microbatch())
        return super().forward(input)


def test_microbatch_token_is_one_object_for_all_partitions():
    """current_microbatch() is the same 0-d tensor everywhere, another one for each micro-batch and mini-batch."""
    first, last = Ask(), Ask()
    model = pipeline(first, nn.Tanh(), last, balance=[1, 1, 1], chunks=4)
    train(model)
    train(model)
    assert [int(token) for token in first.tokens] == [0, 1, 2, 3] * 2
    assert all(token.dim() == 0 for token in first.tokens)
    assert all(a is b for a, b in zip(first.tokens, last.tokens, strict=True))
    assert len(set(first.tokens)) == 8


@modes
@pytest.mark.parametrize("memory", [dict, weakref.WeakKeyDictionary])
@pytest.mark.parametrize("balance", [[1, 1, 1], [1, 2]], ids=str)
def test_microbatch_token_is_a_key(balance, memory, checkpoint):
    """What a layer keeps under the token, another one finds: a skip connection around the engine."""
    kept = memory()

    def keep(s, x):
        kept[current_microbatch()] = x * s.a
        return x * s.b

    def find(s, x):
        return x * s.b + kept.pop(current_microbatch())

    model = nn.Sequential(Fn(keep), Fn(lambda s, x: x.sin() * s.a), Fn(find))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, balance, chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        ours, theirs = rand(6, 3, grad=True), rand(6, 3, grad=True)
        total(pipe(ours)).backward()
        total((theirs * plain[0].b).sin() * plain[1].a * plain[2].b + theirs * plain[0].a).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert len(kept) == 0
    assert_same_state(pipe, plain)


def test_events_of_a_forward_and_a_backward(recorder):
    """A partition tells of each task and, in between, of its layers: in order forward, in reverse backward."""
    train(four_layers())
    for j, names in enumerate((["0", "1"], ["2", "3"])):
        assert recorder.of(j, "forward") == task(0, "forward", names) + task(1, "forward", names)
        back = names[::-1]
        started = [event for event in recorder.of(j, "backward") if event[0] != "layer_ended"]
        both = task(1, "backward", back) + task(0, "backward", back)
        assert started == [event for event in both if event[0] != "layer_ended"]


def test_every_layer_of_a_backward_ends(recorder):
    """In backward too, each layer that starts ends before the next one starts, or before its task ends."""
    train(four_layers())
    for j, names in enumerate((["1", "0"], ["3", "2"])):
        assert recorder.of(j, "backward") == task(1, "backward", names) + task(0, "backward", names)


def test_backward_of_a_layer_that_adds_no_node(recorder):
    """A layer that returns its input, such as nn.Identity, does not come after the layers before it in backward."""
    train(pipeline(nn.Linear(4, 4), nn.Identity(), nn.Tanh(), balance=[3], chunks=1))
    started = [layer for event, _, _, layer in recorder.of(0, "backward") if event == "layer_started"]
    assert [layer for layer in started if layer != "1"] == ["2", "0"]
    assert started == sorted(started, reverse=True)


def test_recomputation_comes_before_its_backward(recorder):
    """A checkpointed micro-batch is recomputed, layers in order, and then runs backward, one task after the other."""
    train(four_layers(checkpoint="always"))
    tasks = [event for event in recorder.of(1, "recompute", "backward") if event[0] == "task_started"]
    assert tasks == [("task_started", i, phase, None) for i in (1, 0) for phase in ("recompute", "backward")]
    assert recorder.of(1, "recompute") == task(1, "recompute", ["2", "3"]) + task(0, "recompute", ["2", "3"])


def test_tasks_of_a_partition_do_not_overlap(recorder):
    """Within a partition a task ends before the next one starts, in every phase."""
    train(four_layers(chunks=4, checkpoint="except_last"))
    for j in range(2):
        tasks = [event for event, _, jj, *_ in recorder.events if jj == j and event.startswith("task")]
        assert tasks == ["task_started", "task_ended"] * (4 + 3 + 4)


def test_a_layer_that_raises_does_not_end_but_its_task_does(recorder):
    """After an exception the observer is told the end of the task, not of the layer."""

    class Fail(nn.Module):
        def forward(self, input):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pipeline(nn.Linear(4, 4), Fail(), balance=[1, 1], chunks=1)(torch.ones(4, 4))
    assert recorder.of(1, "forward") == [
        ("task_started", 0, "forward", None),
        ("layer_started", 0, "forward", "1"),
        ("task_ended", 0, "forward", "1"),
    ]


def test_attaching_twice_is_attaching_once(recorder):
    """An observer that is attached twice is told everything once, and detached at once."""
    context.attach(recorder)
    model = pipeline(nn.Linear(4, 4), balance=[1], chunks=1)
    train(model)
    assert recorder.of(0, "forward") == task(0, "forward", ["0"])
    context.detach(recorder)
    context.detach(recorder)
    recorder.events.clear()
    train(model)
    assert recorder.events == []


def test_detached_observer_hears_nothing_of_the_backward(recorder):
    """An observer that is detached between forward and backward is told nothing more."""
    output = four_layers()(torch.ones(4, 4))
    context.detach(recorder)
    recorder.events.clear()
    output.sum().backward()
    assert recorder.events == []


def test_unwilling_observer_hears_nothing():
    """An observer is asked once a pass whether it wants to see it."""

    class Sometimes(Recorder):
        asked = 0

        def wanted(self):
            self.asked += 1
            return self.asked == 2

    with attached(Sometimes()) as observer:
        model = four_layers()
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(4, 4))
    assert observer.asked == 3
    assert {step for _, step, *_ in observer.events} == {1}
    assert len(observer.events) == 2 * 2 * 6


class Broken(Recorder):
    """Raises in one of its methods, whenever it is called."""

    def __init__(self, method):
        super().__init__()
        self.calls = 0

        def fail(*_):
            self.calls += 1
            raise ValueError("broken")

        setattr(self, method, fail)


@pytest.mark.parametrize("event", [name for name in vars(Observer) if name.endswith(("_started", "_ended"))])
def test_each_event_has_a_method_that_engines_call(event):
    """What one may override is what engines call, with the same arguments; one that raises is left out after that."""
    told = []
    good, broken = Observer(), Observer()
    setattr(good, event, lambda *details: told.append(details))
    setattr(broken, event, lambda *_: 1 / 0)
    members = Observers((broken, good))
    details = (Where(), "cpu", "cpu:1", 8)[: len(inspect.signature(getattr(Observer, event)).parameters) - 1]
    getattr(members, event)(*details)
    getattr(members, event)(*details)
    assert told == [details, details]
    assert members.members == (good,)
    assert inspect.signature(getattr(Observers, event)) == inspect.signature(getattr(Observer, event))


@pytest.mark.parametrize("method", ["wanted", "task_started", "layer_started", "layer_ended", "task_ended"])
def test_failing_observer_is_reported_and_detached(caplog, recorder, method):
    """An observer that raises is reported once and never called again; training and other observers go on."""
    expected, model = four_layers(chunks=1), four_layers(chunks=1)
    train(expected)
    recorder.events.clear()
    with attached(Broken(method)) as broken:
        train(model)
        train(model)
        assert broken not in context.observers().members
    assert broken.calls == 1
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.levelname == "ERROR"
    assert f"failed in {method} and was detached" in record.getMessage()
    assert record.exc_info[0] is ValueError
    for ours, plain in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 2 * plain.grad)
    tasks = [event for event, *_ in recorder.events if event == "task_ended"]
    assert len(tasks) == 2 * 2 * 2


def test_observer_that_fails_in_two_threads_at_once_is_reported_once(caplog):
    """Two partitions that meet the same failure at the same time give one report."""
    meeting = threading.Barrier(2)

    class Meet(Observer):
        def task_started(self, where):
            if (where.partition, where.microbatch) in {(0, 1), (1, 0)}:
                meeting.wait(timeout=10)
                raise ValueError("both")

    with attached(Meet()):
        train(four_layers())
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


def test_adding_gradients_up_is_no_layers_time(monkeypatch):
    """The backward of a task's last layer ends before gradients are added up: it must not look slower than others."""
    told: list[str] = []

    class Listener(Observer):
        def layer_ended(self, where):
            if where.phase == "backward":
                told.append(f"{where.layer} ended")

        def task_ended(self, where):
            if where.phase == "backward":
                told.append("task ended")

    original = GradientSum.add

    def add(self, *args):
        told.append("added")
        original(self, *args)

    monkeypatch.setattr(GradientSum, "add", add)
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), balance=[2], devices=["cpu"], chunks=2)
    listener = Listener()
    context.attach(listener)
    try:
        model(torch.randn(4, 2)).sum().backward()
    finally:
        context.detach(listener)
    assert told == ["1 ended", "0 ended", "added", "task ended"] * 2
