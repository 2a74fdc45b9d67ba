"""Observing a run on a GPU. It needs one, and is skipped without."""

import collections
import itertools
import statistics
import time

import pytest
import torch
from torch import nn

from pipesight import GPipe, context, trace
from pipesight.recording import observe
from pipesight.trace.gpu_spans import device_spans
from support.observed import description, events

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, SAMPLES, CHUNKS, PARTITIONS = 2048, 16384, 4, 2


@pytest.fixture
def model():
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    return GPipe(layers, [4, 2], devices=["cuda:0"] * PARTITIONS, chunks=CHUNKS, checkpoint="except_last")


def train(model, steps):
    x = torch.randn(SAMPLES, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()


def on_device(found, name):
    return [e for e in found if e["ph"] == "X" and e["name"] == name and "device" in e["args"]]


def medians(times):
    return {key: statistics.median(values) for key, values in times.items()}


class Synchronised(context.Observer):
    """Waits for the GPU at both ends of each task, and takes the time in between."""

    def __init__(self):
        self.times = collections.defaultdict(list)

    def task_started(self, where):
        torch.cuda.synchronize()
        self.begin = time.perf_counter()

    def task_ended(self, where):
        torch.cuda.synchronize()
        self.times[where.phase, where.partition].append((time.perf_counter() - self.begin) * 1e6)


@pytest.mark.alone
def test_tasks_take_as_long_as_in_a_synchronised_run(model, tmp_path):
    """What a task takes on the device is what a clock says that waits for the device at both ends of it."""
    train(model, 3)
    clock = Synchronised()
    context.attach(clock)
    try:
        train(model, 8)
    finally:
        context.detach(clock)
    with observe(tmp_path / "RUN", logs=None):
        train(model, 8)
    found = events(tmp_path / "RUN")
    measured = collections.defaultdict(list)
    names = {"forward": "forward", "forward.recompute": "recompute", "backward": "backward"}
    for name, phase in names.items():
        for task in on_device(found, name):
            if "partition" in task["args"]:
                measured[phase, task["args"]["partition"]].append(task["dur"])
    expected = medians(clock.times)
    assert set(measured) == set(expected) == {(phase, j) for phase in names.values() for j in range(PARTITIONS)}
    for key, duration in medians(measured).items():
        assert duration == pytest.approx(expected[key], rel=0.2, abs=100), key


def test_tasks_are_where_the_host_put_them(model, tmp_path):
    """On the host's clock, a task on the device begins after its launch, and ends before a wait for the step does."""
    train(model, 3)
    ends = []
    with observe(tmp_path / "RUN", logs=None):
        for _ in range(4):
            train(model, 1)
            ends.append(time.perf_counter_ns())
    found, offset = events(tmp_path / "RUN"), description(tmp_path / "RUN")["clock"]["offset_ns"]
    launched = {
        key(e): e["ts"]
        for e in found
        if e["ph"] == "X" and "partition" in e["args"] and "device" not in e["args"] and e["cat"] == "compute"
    }
    ran = [e for e in found if e["ph"] == "X" and "partition" in e["args"] and "device" in e["args"]]
    assert len(ran) == len(launched)
    for task in ran:
        assert task["tid"] >= 10_000_000
        # A layer begins where the one before it ends, even if the device has to wait for it.
        assert "layer" in task["args"] or launched[key(task)] - 30 <= task["ts"]
        assert task["ts"] + task["dur"] <= (ends[task["args"]["step"]] + offset) / 1000 + 30


def key(event):
    args = event["args"]
    return event["name"], args["minibatch"], args["partition"], args["microbatch"], args.get("layer")


def test_layers_fill_their_tasks(model, tmp_path):
    """On the device, the layers of a task follow on each other, from its begin to its end; backwards add up then."""
    with observe(tmp_path / "RUN", logs=None):
        train(model, 3)
    found = events(tmp_path / "RUN")
    for name in ("forward", "backward"):
        layers = collections.defaultdict(list)
        for layer in on_device(found, f"{name}.layer"):
            layers[key(layer)[1:4]].append(layer)
        tasks = [task for task in on_device(found, name) if "partition" in task["args"]]
        assert len(tasks) == 3 * CHUNKS * PARTITIONS
        for task in tasks:
            inside = sorted(layers[key(task)[1:4]], key=lambda e: e["ts"])
            assert len(inside) == (4, 2)[task["args"]["partition"]]
            assert inside[0]["ts"] == task["ts"]
            rest = task["ts"] + task["dur"] - inside[-1]["ts"] - inside[-1]["dur"]
            assert rest == 0 if name == "forward" else rest >= 0
            for one, other in itertools.pairwise(inside):
                assert one["ts"] + one["dur"] == other["ts"]


@pytest.mark.alone
def test_clocks_are_compared_again(model, tmp_path, monkeypatch):
    """The clocks of host and device are compared again and again, beside the training, and stay together."""
    monkeypatch.setattr("pipesight.trace.gpu_spans._ANCHOR_LASTS", 2e8)
    train(model, 3)
    with observe(tmp_path / "RUN", logs=None):
        train(model, 1)
        first = device_spans._anchors[0]
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            train(model, 1)
        assert device_spans._anchors[0].moment > first.moment + 1e9
        drift = first.event.elapsed_time(device_spans._anchors[0].event) * 1e6
        assert drift == pytest.approx(device_spans._anchors[0].moment - first.moment, abs=200_000)
    line = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for name in ("forward", "backward", "forward.recompute")
        for e in on_device(events(tmp_path / "RUN"), name)
        if "partition" in e["args"]
    )
    assert all(end <= start + 50 for (_, end), (start, _) in itertools.pairwise(line))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_waiting_in_the_loop(model, tmp_path, monkeypatch):
    """After the first step, nothing that observes waits for the device in the threads that train."""
    x = torch.randn(256, WIDTH, device="cuda")
    with observe(tmp_path / "RUN"):
        train(model, 1)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()


def test_capture_of_a_graph_while_observed(tmp_path):
    """A CUDA graph can be captured while the writer of the trace is at work."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
    x = torch.randn(8, 64, device="cuda")
    with observe(tmp_path / "RUN", logs=None), torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                model(x)
        torch.cuda.synchronize()
        for _ in range(20):
            for _ in range(20):
                model(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = model(x)
                trace.flush()
            graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, model(x))
    assert description(tmp_path / "RUN")["outcome"] == "ok"
