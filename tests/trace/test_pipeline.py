"""A pipeline's spans, which appear by themselves."""

import collections
import itertools

import pytest
import torch
from torch import nn

from pipesight import GPipe, context, trace
from pipesight.testing import capture_events
from pipesight.trace import ai
from support import warm

CHUNKS, PARTITIONS = 4, 2


class Spanned(nn.Module):
    """A layer with a span of its own."""

    def forward(self, input):
        with ai.data.item:
            return input * 1


@pytest.fixture(params=["never", "except_last", "always"])
def events(request):
    """The events of one training step, with the checkpoint mode in front."""
    model = GPipe(
        nn.Sequential(nn.Linear(3, 3), Spanned(), nn.Linear(3, 3)),
        [2, 1],
        devices=["cpu"] * PARTITIONS,
        chunks=CHUNKS,
        checkpoint=request.param,
    )
    with capture_events() as events, ai.pipeline.train:
        model(torch.randn(8, 3)).sum().backward()
    return request.param, events


def spans(events, name):
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def test_tasks(events):
    """Every micro-batch has one forward and one backward in every partition, and the recomputations of its mode."""
    mode, recorded = events
    recomputed = {"never": 0, "except_last": CHUNKS - 1, "always": CHUNKS}[mode]
    expected = {(i, j) for i in range(CHUNKS) for j in range(PARTITIONS)}
    for name in ("forward", "backward"):
        tasks = [(e["args"]["microbatch"], e["args"]["partition"]) for e in spans(recorded, name)]
        assert sorted(tasks) == sorted(expected)
    again = [(e["args"]["microbatch"], e["args"]["partition"]) for e in spans(recorded, "forward.recompute")]
    assert sorted(again) == sorted((i, j) for i, j in expected if i < recomputed)
    assert {e["args"]["step"] for e in spans(recorded, "forward")} == {0}
    assert {e["cat"] for e in spans(recorded, "forward")} == {"compute"}


def test_layers_are_nested_in_tasks(events):
    """A layer's span names the layer as the model does, lies in its task's, and holds the spans of the layer's code."""
    mode, recorded = events
    by_id = {e["id"]: e for e in recorded if e["ph"] == "X"}
    for phase in ("forward", "backward", *(["forward.recompute"] if mode != "never" else [])):
        layers = spans(recorded, f"{phase}.layer")
        assert {e["args"]["layer"] for e in layers} == {"0", "1", "2"}
        for layer in layers:
            task = by_id[layer["args"]["p_idx"]]
            assert task["name"] == phase
            assert task["tid"] == layer["tid"]
            assert layer["args"]["level"] == task["args"]["level"] + 1
            for key in ("step", "partition", "microbatch"):
                assert layer["args"][key] == task["args"][key]
            assert task["ts"] <= layer["ts"]
            assert layer["ts"] + layer["dur"] <= task["ts"] + task["dur"]
    for item in spans(recorded, "item"):
        assert by_id[item["args"]["p_idx"]]["args"]["layer"] == "1"


def test_one_task_at_a_time(events):
    """The tasks of a partition do not overlap."""
    _, recorded = events
    lines = collections.defaultdict(list)
    for name in ("forward", "backward", "forward.recompute"):
        for e in spans(recorded, name):
            lines[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert len(lines) == PARTITIONS
    for line in lines.values():
        line.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(line))


def test_tasks_stand_by_themselves(events):
    """Tasks are children of the trace, whatever is open where the pipeline is called: they run in other threads."""
    _, recorded = events
    for name in ("forward", "backward", "forward.recompute"):
        assert {e["args"]["p_idx"] for e in spans(recorded, name)} <= {6}


def test_arrows(events):
    """An arrow goes from each task to the one that takes its output, forward and backward, and nowhere else."""
    _, recorded = events
    starts = {e["id"]: e for e in recorded if e["ph"] == "s"}
    ends = {e["id"]: e for e in recorded if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == 2 * CHUNKS * (PARTITIONS - 1)
    for key, start in starts.items():
        assert start["ts"] <= ends[key]["ts"]
        assert start["tid"] != ends[key]["tid"]


STEP = """
import torch
from torch import nn
from pipesight import GPipe
from pipesight.testing import capture_events
model = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2)
with capture_events() as events:
    model(torch.randn(2, 1)).sum().backward()
print(*{event["id"] for event in events if event["ph"] == "s"})
"""


def test_arrows_of_two_processes():
    """Arrows of one process have other numbers than those of the next, so that one page can show both."""
    outputs = [warm.run("-c", STEP).stdout for _ in range(2)]
    one, other = (set(map(int, output.split())) for output in outputs)
    assert len(one) == len(other) == 4
    assert one.isdisjoint(other)
    assert max(one | other) < 2**53


def test_a_layer_that_raises():
    """The spans of a task and layer that failed end there, and the next mini-batch is right again."""

    class Fragile(nn.Module):
        broken = True

        def forward(self, input):
            if self.broken:
                raise RuntimeError("no")
            return input

    fragile = Fragile()
    model = GPipe(nn.Sequential(nn.Linear(3, 3), fragile), [1, 1], devices=["cpu"] * 2)
    with capture_events() as events, pytest.raises(RuntimeError, match="no"):
        model(torch.randn(2, 3))
    assert len(spans(events, "forward")) == 2
    assert {e["args"]["layer"] for e in spans(events, "forward.layer")} == {"0", "1"}
    fragile.broken = False
    with capture_events() as events:
        model(torch.randn(2, 3))
    assert {e["args"]["p_idx"] for e in spans(events, "forward")} == {6}


def test_switch():
    """What is disabled is not recorded, tasks and layers one by one."""
    model = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=["cpu"])
    layers = ai.compute.forward.derive("layer")
    layers.disable()
    try:
        with capture_events() as events:
            model(torch.randn(2, 3))
    finally:
        layers.enable()
    assert spans(events, "forward")
    assert not spans(events, "forward.layer")


def test_no_cost_without_a_trace():
    """Nobody observes a pass that no trace is written of."""
    assert trace.ai is ai
    assert not context.observers()
    with capture_events():
        assert context.observers()


def test_transfer(monkeypatch):
    """Tensors that come from another device have a span, with the devices and the size."""
    observer = next(o for o in context.observer._attached if type(o).__name__ == "PipelineSpans")
    where = context.Where()
    with capture_events() as events:
        observer.transfer_started(where, "cpu", "cuda:0", 64)
        observer.transfer_ended(where, "cpu", "cuda:0", 64)
    (transfer,) = spans(events, "transfer")
    assert transfer["cat"] == "device"
    assert {"from": "cpu", "to": "cuda:0", "size": 64}.items() <= transfer["args"].items()
