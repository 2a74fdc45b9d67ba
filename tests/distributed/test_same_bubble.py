"""The same stages have the same bubble in torch's schedules and in a `DistributedPipeline`, to the microsecond.

Time is made: a layer takes what it says, a message arrives when it was sent, and nothing else takes any. So no load on
the machine can change a bubble, and what it has to be is known.
"""

from __future__ import annotations

import json

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.plan import save_schedule, zbv
from pipesight.runs.reading.run import open_run
from support.torchrun import skip_old_torch, torchrun

PROGRAM = """
import json, os, time
import torch
import torch.distributed as dist
from torch import nn

BEGIN = now = 10**15  # nanoseconds, by the clock that all ranks begin with
SENT = 2 * 4 * 4  # bytes of a micro-batch
received, spent = {}, []
time.perf_counter_ns = time.time_ns = lambda: now

def spend(milliseconds, x):
    global now
    if counts and type(x) is torch.Tensor and x.device.type == "cpu":
        spent.append((now, now + milliseconds * 10**6))
        now = spent[-1][1]

def send(group, tensors, *args):
    for tensor in tensors:
        if tensor.nbytes == SENT:  # it holds the time at which it was sent
            tensor.data.view(-1).view(torch.float32).fill_((now - BEGIN) // 10**6)
    return post(group, tensors, *args)

def receive(group, tensors, *args):
    work = accept(group, tensors, *args)
    received[id(work)] = work, [tensor for tensor in tensors if tensor.nbytes == SENT]
    return work

def wait(work, *args):
    global now
    result = end(work, *args)
    for tensor in received.pop(id(work), (None, ()))[1]:
        now = max(now, BEGIN + int(tensor.view(-1).view(torch.float32)[0]) * 10**6)
    return result

post, accept, end = dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.Work.wait
dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.Work.wait = send, receive, wait

import pipesight
from pipesight.distributed import DistributedPipeline
from pipesight.recording.rank_clocks import RankClocks
from torch.distributed.pipelining import PipelineStage, schedules

RankClocks.begin = lambda clocks: None  # there is nothing to correct
dist.init_process_group("gloo")
rank, size, folder = dist.get_rank(), dist.get_world_size(), os.environ["FOLDER"]

class Spending(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        spend(forward, x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        spend(ctx.backward, gradient)
        return gradient, None, None

class Layer(nn.Module):
    def __init__(self, j):
        super().__init__()
        self.times, self.weight_time = (10 + 4 * (j % 3), 12 + 3 * (j % 2)), 6 + j % 4
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        weight = Spending.apply(self.inner.weight, 0, self.weight_time)
        return Spending.apply(nn.functional.linear(x, weight, self.inner.bias), *self.times)

def torch_pipeline(kind, parts, n):
    mine = [rank] if n == size else [rank, n - 1 - rank] if kind in IN_V else [*range(rank, n, size)]
    stages = [PipelineStage(parts[j], j, n, torch.device("cpu")) for j in mine]
    if kind.endswith(".csv"):
        schedule = schedules._PipelineScheduleRuntime(stages, CHUNKS, loss_fn=nn.MSELoss())
        schedule._load_csv(kind)
    else:
        schedule = schedules.get_schedule_class(kind)
        schedule = schedule(stages[0] if n == size else stages, CHUNKS, loss_fn=nn.MSELoss())
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
    arguments, targets = ([x] if first else []), ({"target": x} if last else {})
    return (lambda: schedule.step(*arguments, **targets)), [p for s in stages for p in s.submod.parameters()]

def our_pipeline(name, parts, n):
    layers = nn.Sequential(*parts)
    pipeline = DistributedPipeline(layers, [1] * n, chunks=CHUNKS, loss_fn=nn.MSELoss(), schedule=name)
    return (lambda: pipeline.step(x, x)), pipeline.parameters()

x = torch.randn(2 * CHUNKS, 4)
for kind, (name, n) in KINDS.items():
    for engine in ("torch", "ours"):
        dist.barrier()
        now = BEGIN
        spent.clear()
        parts = [Layer(j) for j in range(n)]
        with pipesight.observe(os.path.join(folder, f"{name}-{engine}")):
            step, weights = torch_pipeline(kind, parts, n) if engine == "torch" else our_pipeline(name, parts, n)
            optimizer = torch.optim.SGD(weights, lr=0.1)
            for counts in (False, True):  # in the first step, shapes are found out
                optimizer.zero_grad()
                step()
                optimizer.step()
        print(json.dumps([name, engine, rank, spent]))
dist.barrier()
dist.destroy_process_group()
"""
KINDS = {
    "GPipe": ("gpipe", 2),
    "1F1B": ("1f1b", 2),
    "Interleaved1F1B": ("interleaved-1f1b", 4),
    "LoopedBFS": ("looped-bfs", 4),
    "InterleavedZeroBubble": ("interleaved-zero-bubble", 4),
    "ZBVZeroBubble": ("zbv-zero-bubble", 4),
    "DualPipeV": ("dualpipev", 4),
    "zbv.csv": ("zbv.csv", 4),
}
IN_V = ("ZBVZeroBubble", "DualPipeV", "zbv.csv")
CHUNKS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Run every schedule in both engines; return where, and when layers ran in the last step, of all ranks."""
    skip_old_torch()
    folder = tmp_path_factory.mktemp("recorded")
    save_schedule(zbv(4, CHUNKS), folder / "zbv.csv")
    settings = f"KINDS, IN_V, CHUNKS = {KINDS!r}, {IN_V!r}, {CHUNKS}\n"
    written, _ = torchrun(2, "", folder, begin=settings + PROGRAM, end="", timeout=120)
    spent = {}
    for line in written.splitlines():
        name, engine, _, own = json.loads(line)
        spent.setdefault((name, engine), []).extend(own)
    return folder, spent


@pytest.mark.parametrize("kind", KINDS)
def test_same_bubble(recorded, kind):
    """The bubble is what the layers' own times make it, and the same in both engines."""
    folder, spent = recorded
    name, _ = KINDS[kind]
    found = {}
    for engine in ("torch", "ours"):
        times = spent[name, engine]
        window = max(end for _, end in times) - min(begin for begin, _ in times)
        truth = 1 - sum(end - begin for begin, end in times) / (2 * window)
        with open_run(folder / f"{name}-{engine}") as run:
            report = analyse(run, steps=range(1, 2))
        (pipeline,) = report.pipelines
        assert pipeline.facts.schedule == (
            "own order" if (kind, engine) == ("zbv.csv", "torch") else name.removesuffix(".csv")
        )
        assert pipeline.bubble == pytest.approx(truth, abs=1e-9)
        assert pipeline.window.mean == window / 1000
        found[engine] = pipeline.bubble, pipeline.bound
    if kind == "DualPipeV":  # torch sends what a forward and a backward in one have made after both
        assert found["torch"][0] > found["ours"][0]
        assert found["torch"][1] == found["ours"][1]
    else:
        assert found["torch"] == found["ours"]
