"""Spans on a GPU. They need one, and are skipped without."""

import itertools
import time

import pytest
import torch
from torch import nn

from pipesight import GPipe, trace
from pipesight.testing import capture_events
from pipesight.trace import ai
from pipesight.trace.gpu_spans import device_spans

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_device(events, name):
    return [e for e in events if e["ph"] == "X" and e["name"] == name and "device" in e["args"]]


def heavy(width=2048, layers=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).cuda()


@pytest.mark.alone
def test_device_spans_agree_with_synchronised_time():
    """What the device's events say of a forward is what a clock says that waits for the device."""
    model, x = heavy(), torch.randn(4096, 2048, device="cuda")
    model(x)
    torch.cuda.synchronize()
    timed = []
    with trace.instrument(), capture_events() as events:
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.no_grad():
                model(x)
            torch.cuda.synchronize()
            timed.append((time.perf_counter() - start) * 1e6)
    spans = on_device(events, "forward")
    assert len(spans) == 5
    measured = sorted(e["dur"] for e in spans)[2]
    assert measured == pytest.approx(sorted(timed)[2], rel=0.2, abs=100)


def test_device_spans_lie_between_launch_and_wait():
    """On the host's clock, a span on the device begins after its launch did, and ends before a wait for it does."""
    model, x = heavy(), torch.randn(4096, 2048, device="cuda")
    model(x)
    torch.cuda.synchronize()
    with trace.instrument(), capture_events() as events:
        for _ in range(3):
            with ai.pipeline.train:
                with torch.no_grad():
                    model(x)
                torch.cuda.synchronize()
    rounds = [e for e in events if e["name"] == "train"]
    spans = on_device(events, "forward")
    assert len(rounds) == len(spans) == 3
    for outer, inner in zip(rounds, spans, strict=True):
        assert outer["ts"] - 20 <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 20
        assert inner["tid"] != outer["tid"]


def test_pipeline_tasks_on_the_device():
    """Each task and layer of a pipeline on a GPU has a span on the device's track; tasks do not overlap there."""
    model = GPipe(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), [2, 2], devices=["cuda:0"] * 2, chunks=4)
    x = torch.randn(4096, 512, device="cuda")
    model(x).sum().backward()
    with capture_events() as events:
        model(x).sum().backward()
    for name in ("forward", "backward"):
        tasks = {(e["args"]["microbatch"], e["args"]["partition"]) for e in on_device(events, name)}
        assert tasks == {(i, j) for i in range(4) for j in range(2)}
    assert len(on_device(events, "forward.layer")) == 16
    line = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for name in ("forward", "backward", "forward.recompute")
        for e in on_device(events, name)
    )
    assert all(end <= start + 2 for (_, end), (start, _) in itertools.pairwise(line))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_waiting_in_the_loop(monkeypatch):
    """After the first span, nothing waits for the device until the trace ends."""
    model, x = heavy(1024, 2), torch.randn(256, 1024, device="cuda")
    with trace.instrument(), capture_events():
        model(x)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited"))
        with torch.cuda.device(0):
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(20):
                    model(x).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        monkeypatch.undo()


def test_pool_does_not_grow():
    """Events of CUDA are used again: however long a run, it takes no more of them than wait for the writer."""
    model, x = heavy(256, 1), torch.randn(8, 256, device="cuda")
    with trace.instrument(), capture_events(), torch.no_grad():
        for number in range(20_000):
            model(x)
            if not number % 20:
                torch.cuda.synchronize()
        device_spans.resolve(True)
        assert 0 < device_spans.spare < 10_000


def test_graph_capture():
    """Spans do not break the capture of a CUDA graph."""
    model, x = heavy(256, 2), torch.randn(8, 256, device="cuda")
    stream = torch.cuda.Stream()
    with trace.instrument(), capture_events(), torch.no_grad():
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        torch.cuda.synchronize()
        expected = model(x)
    torch.testing.assert_close(y, expected)


def test_transfers_between_devices():
    """Copies to and from the GPU carry their size, in a pipeline over both too."""
    model = GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [1, 1], devices=["cpu", "cuda:0"], chunks=2)
    with trace.instrument(), capture_events() as events:
        torch.ones(4).to("cuda:0").cpu()
        model(torch.randn(4, 8)).sum().backward()
    copies = [e["args"] for e in events if e["name"] == "transfer"]
    ways = [(c["from"], c["to"], c["size"], "partition" in c) for c in copies]
    assert ways[:2] == [("cpu", "cuda:0", 16, False), ("cuda:0", "cpu", 16, False)]
    inside = sorted(way for way in ways if way[3])
    assert inside == [("cpu", "cuda:0", 64, True)] * 2 + [("cuda:0", "cpu", 64, True)] * 2


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_model_on_the_device():
    """A compiled model trains under a trace."""
    model = torch.compile(heavy(64, 2))
    with capture_events() as events, ai.compute.forward:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    assert [e["name"] for e in events][-1] == "forward"
