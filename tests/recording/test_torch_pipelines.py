"""Programs that use ``torch.distributed.pipelining`` alone are recorded as those with a `DistributedPipeline` are."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from pipesight._import_watch import ImportWatch
from pipesight.analysis.analyse import analyse
from pipesight.plan import measure
from pipesight.recording.torch_pipelines.stage_layers import layers_in
from pipesight.runs.reading.event_codes import BACKWARD, FORWARD, WEIGHT
from pipesight.runs.reading.run import open_run
from support.schemas import validated
from support.torchrun import skip_old_torch, torchrun

# No part of pipesight is named but `observe`.
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
import pipesight
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size, folder = dist.get_rank(), dist.get_world_size(), os.environ["FOLDER"]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == float(os.environ.get("FAILS", "inf")) and rank == 1:
            raise ValueError("a bad layer")
        return x + torch.relu(self.inner(x))

class Part(nn.Module):
    def __init__(self, j, last):
        super().__init__()
        self.first = nn.Linear(8, 8) if j == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(j): Block()})
        self.head = nn.Linear(8, 8) if last else None
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

def train(name, kind, mine, n, steps=3, chunks=4, evaluates=False, change=None, stats=None):
    with pipesight.observe(os.path.join(folder, name), stats=stats):
        import torch.distributed.pipelining as pipelining
        torch.manual_seed(0)
        parts = [Part(j, j == n - 1) for j in range(n)]
        stages = []
        for j in mine:
            part = parts[j] if change is None else change(parts[j])
            stages.append(pipelining.PipelineStage(part, j, n, torch.device("cpu")))
        single = n == size
        schedule = getattr(pipelining.schedules, kind)(
            stages[0] if single else stages, chunks, loss_fn=nn.MSELoss()
        )
        first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
        optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.1)
        torch.manual_seed(1)
        x = torch.randn(8, 8)
        found = []
        for _ in range(steps):
            losses = []
            schedule.step(*([x] if first else []), **({"target": x, "losses": losses} if last else {}))
            optimizer.step()
            optimizer.zero_grad()
            found += [sum(loss.item() for loss in losses) / chunks] if last else []
        if evaluates:
            with torch.no_grad():
                schedule.eval(*([x] if first else []), **({"target": x, "losses": []} if last else {}))
    return found
"""
END = "\ndist.barrier()\ndist.destroy_process_group()\n"
KINDS = {
    "ScheduleGPipe": ("gpipe", 2),
    "Schedule1F1B": ("1f1b", 2),
    "ScheduleInterleaved1F1B": ("interleaved-1f1b", 4),
    "ScheduleLoopedBFS": ("looped-bfs", 4),
    "ScheduleInterleavedZeroBubble": ("interleaved-zero-bubble", 4),
    "ScheduleZBVZeroBubble": ("zbv-zero-bubble", 4),
    "ScheduleDualPipeV": ("dualpipev", 4),
}


@pytest.fixture(scope="module", autouse=True)
def _torch_is_supported():
    skip_old_torch()  # older ones drop what gloo sends


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record every schedule, harder stages, and then one of ours with the same recording machinery."""
    folder = tmp_path_factory.mktemp("recorded")
    body = f"""
    for kind, (_, n) in {KINDS!r}.items():
        mine = [rank] if n == size else [rank, 3 - rank] if "V" in kind else [rank, rank + 2]
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            losses = train(kind, kind, mine, n, evaluates=kind == "Schedule1F1B")
        if losses: print(kind, *losses)
        os.makedirs(os.path.join(folder, "PROFILES", kind), exist_ok=True)
        profiler.export_chrome_trace(os.path.join(folder, "PROFILES", kind, f"rank-{{rank}}.json"))
    def frozen(part):
        return part.requires_grad_(rank != 0)
    class NoOptimizer:
        def __init__(self, *args, **kwargs): pass
        def step(self): pass
        def zero_grad(self): pass
    sgd = torch.optim.SGD
    if rank == 0: torch.optim.SGD = NoOptimizer
    train("FROZEN", "Schedule1F1B", [rank], 2, change=frozen)
    torch.optim.SGD = sgd
    config = {{"all": {{"enabled": True, "layers": {{"layer_name_regex_pattern": ".*"}}, "LogTensorStats":
              {{"enabled": True, "tensors": ["activation"], "stats": ["mean"], "freq": 1}}}}}}
    losses = train("STATS", "Schedule1F1B", [rank], 2, stats=config)
    if losses: print("losses", *losses)
    from pipesight.distributed import DistributedPipeline
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipeline = DistributedPipeline(layers, [1, 1], chunks=4, loss_fn=nn.MSELoss())
    with pipesight.observe(os.path.join(folder, "OURS")):
        pipeline.step(torch.ones(8, 8), torch.ones(8, 8))
    """
    written, _ = torchrun(2, body, folder, begin=PROGRAM, end=END)
    return folder, written


def printed_losses(written, name):
    """Return what the last rank has printed."""
    (line,) = (line for line in written.splitlines() if line.split()[:1] == [name])
    return [float(word) for word in line.split()[1:]]


def analysed(path):
    with open_run(path) as run:
        return analyse(run), run.tasks(), run.transfers()


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule(recorded, kind):
    """Each task of each schedule is there once, with layers, messages, samples, and the pipeline's description."""
    name, n = KINDS[kind]
    report, tasks, transfers = analysed(recorded[0] / kind)
    evaluated = kind == "Schedule1F1B"
    assert report.ranks == (0, 1)
    assert report.left.incomplete == 0
    assert (len(report.steps), report.evaluations) == (3, int(evaluated))
    forwards = tasks.where(tasks.phase == FORWARD)
    places = np.stack([forwards.minibatch, forwards.partition, forwards.microbatch])
    assert len(forwards) == len(np.unique(places, axis=1).T) == (3 + evaluated) * n * 4
    assert (tasks.phase == BACKWARD).sum() == 3 * n * 4
    assert ((tasks.phase == WEIGHT).sum() > 0) == ("Zero" in kind or "V" in kind)
    assert tasks.samples[(tasks.phase == FORWARD) & (tasks.partition == 0)].tolist() == [8] * (3 + evaluated) * 4
    (pipeline,) = report.pipelines
    facts = pipeline.facts
    assert (facts.schedule, facts.partitions, facts.chunks, facts.batch_size) == (name, n, 4, 8)
    assert facts.balance == (*[2] * (n - 1), 3)
    assert facts.devices == ("cpu",) * n
    assert sorted({rank for (rank,) in facts.ranks}) == [0, 1]
    names = [[f"{layer.partition}: {layer.name}" for layer in facts.layers if layer.partition == j] for j in range(n)]
    assert names == [[f"{j}: first", f"{j}: blocks.{j}", *([f"{j}: head"] if j == n - 1 else [])] for j in range(n)]
    assert {layer.output_bytes for layer in facts.layers} == {8 * 8 * 4}
    timed = {(layer.partition, layer.name) for layer in report.layers if layer.forward is not None}
    assert timed == {(layer.partition, layer.name) for layer in facts.layers}
    # With torch's V, neighbours on one rank pass tensors on directly.
    crossings = 2 if "V" in kind else n - 1
    assert len(transfers) == 4 * crossings * (2 * 3 + evaluated)
    assert report.overall is not None
    assert 0 < report.overall.bound < 1
    (curve,) = [curve for curve in report.curves if curve.name == "loss"]
    assert (curve.steps, curve.values) == ((0, 1, 2), pytest.approx(printed_losses(recorded[1], kind), rel=1e-5))


@pytest.mark.parametrize("kind", KINDS)
def test_profiles_of_the_same_runs(recorded, kind):
    """What PyTorch's profiler saw meanwhile has the same tasks, in the same order, without waits for messages."""
    profile = recorded[0] / "PROFILES" / kind
    report, profiled, _ = analysed(profile)
    if kind == "Schedule1F1B":  # which annotates nothing
        assert len(profiled) == 0
        assert "record the program with pipesight run" in report.verdict.text
        return
    _, tasks, _ = analysed(recorded[0] / kind)
    assert report.left.incomplete == 0
    for rank in (0, 1):
        mine, theirs = (table.where(table.rank == rank) for table in (tasks, profiled))
        mine, theirs = (table.where(np.argsort(table.end, kind="stable")) for table in (mine, theirs))
        columns = [
            list(zip(t.minibatch - t.minibatch.min(), t.partition, t.microbatch, t.phase, strict=True))
            for t in (mine, theirs)
        ]
        assert columns[0] == columns[1]
        assert (theirs.begin[1:] >= theirs.end[:-1]).all()


def test_description_of_each_rank(recorded):
    """A rank describes its own part, as the schema says; the engine is named."""
    for file in ("run.json", "ranks/rank-00001.json"):
        facts = validated("run", json.loads((recorded[0] / "Schedule1F1B" / file).read_text()))
        (pipeline,) = facts["pipelines"]
        assert pipeline["engine"] == "torch.distributed.pipelining"
        assert pipeline["balance"].count(None) == pipeline["devices"].count(None) == 1


def test_rank_that_learns_nothing(recorded):
    """A rank without weights to train has no optimizer, and yet its steps are those of the others."""
    report, tasks, _ = analysed(recorded[0] / "FROZEN")
    assert report.left.incomplete == 0
    assert sorted(set(tasks.step[tasks.rank == 0].tolist())) == [0, 1, 2]


def test_statistics(recorded):
    """Statistics are those of the plain model; the forward that only finds out shapes is left out."""
    folder, written = recorded
    found = {}
    for file in sorted((folder / "STATS" / "stats").glob("*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            found[line["iteration"], line["layer"]] = line["value"]
    begin = PROGRAM.index("class Block"), PROGRAM.index("def train")
    space = {"nn": nn, "torch": torch, "os": __import__("os"), "rank": 0}
    exec(PROGRAM[slice(*begin)], space)
    torch.manual_seed(0)
    model = nn.Sequential(*(space["Part"](j, j == 1) for j in range(2))).double()
    torch.manual_seed(1)
    x = torch.randn(8, 8).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, losses = {}, []
    for step in range(3):
        handles = [
            module.register_forward_hook(
                lambda _, __, output, key=(step, f"stage{name}"): expected.__setitem__(key, output.mean().item())
            )
            for name, module in model.named_modules()
            if name.count(".") and not isinstance(module, nn.ModuleDict)
        ]
        loss = nn.functional.mse_loss(model(x), x)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
    assert found.keys() >= expected.keys()
    assert [found[key] for key in expected] == pytest.approx(list(expected.values()), abs=1e-6)
    assert printed_losses(written, "losses") == pytest.approx(losses, rel=1e-5)


def test_our_engine_once(recorded):
    """A `DistributedPipeline` runs on the same classes, and its tasks are recorded once."""
    report, tasks, _ = analysed(recorded[0] / "OURS")
    assert len(tasks) == 2 * 4 * 2
    assert report.left.incomplete == 0
    assert len(report.pipelines) == 1


def test_stage_that_raises(tmp_path):
    """The error reaches the program as it was, with a note on where it was raised, and so does the description."""
    body = """
    try:
        train("RUN", "Schedule1F1B", [rank], 2)
    except RuntimeError as error:
        if rank == 1:
            print(type(error.__cause__).__name__, error.__cause__, error.__notes__)
        sys.stdout.flush()
        os._exit(0)
    """
    written, _ = torchrun(2, body, tmp_path, begin=PROGRAM, end="", FAILS="6")
    assert "ValueError a bad layer [\"in partition 1, layer 'blocks.1', micro-batch " in written
    own = json.loads((tmp_path / "RUN" / "ranks" / "rank-00001.json").read_text())
    assert own["outcome"].startswith("RuntimeError: [Stage 1] failed to run forward")
    assert own["outcome"].endswith(", forward")


def test_layers_of_stages():
    """Layers are what a stage's forward calls: lists are looked into, compiled modules are not."""

    def names(module):
        return list(layers_in(module))

    blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)])
    part = nn.Module()
    part.embedding, part.blocks = nn.Linear(2, 2), blocks
    wrapped = nn.Module()
    wrapped.net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert names(part) == ["embedding", "blocks.0", "blocks.1"]
    assert names(wrapped) == ["net.0", "net.1"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ["0", "1"]
    assert names(nn.Linear(2, 2)) == ["Linear"]
    assert names(torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend="eager")) == ["Sequential"]
    blocks[1] = torch.compile(blocks[1], backend="eager")
    assert names(part) == ["embedding", "blocks.0", "blocks.1"]


def test_import_watch(tmp_path, monkeypatch):
    """What waits for a module is called once it has run, and not before; one that is there already calls at once."""
    (tmp_path / "watched_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    def told():
        seen.append(sys.modules["watched_module"].VALUE)

    removed = ImportWatch("watched_module", lambda: seen.append("never"))
    ImportWatch("watched_module", told)
    removed.remove()
    assert seen == []
    import watched_module  # noqa: F401

    assert seen == [1]
    ImportWatch("watched_module", told)
    assert seen == [1, 1]
    del sys.modules["watched_module"]


class Block(nn.Module):
    """That of the program."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


KEEPS_OUTPUTS = not hasattr(pipelining.stage._PipelineStageBase, "release_fwd_send_outputs")  # before torch 2.15


def counted(j, n):
    """Return what a plain stage keeps of a micro-batch, with its output and without its input, and its weights."""
    layers = [*([nn.Linear(8, 8)] if j == 0 else []), Block(), *([nn.Linear(8, 8)] if j == n - 1 else [])]
    part = nn.Sequential(*layers)
    saved = []
    x, y = torch.randn(2, 8, requires_grad=j > 0), torch.randn(2, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t.detach(), lambda t: t):
        output = part(x)
        if j == n - 1:
            nn.functional.mse_loss(output, y)
    kept = [*saved, *([output] if KEEPS_OUTPUTS or j == n - 1 else [])]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    for known in (x, y, *part.parameters()):
        sizes.pop(known.untyped_storage().data_ptr(), None)
    return sum(sizes.values()), sum(p.nbytes for p in part.parameters())


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS"])
def test_memory(recorded, kind):
    """Each stage holds what hooks count on the plain one, of as many micro-batches as its schedule keeps alive."""
    n = KINDS[kind][1]
    with open_run(recorded[0] / kind) as run:
        found, plan = analyse(run).memory, measure(run)
    assert found is not None
    assert [entry.partition for entry in found.partitions] == list(range(n))
    for entry in found.partitions:
        kept, weights = counted(entry.partition, n)
        alive = min(n - entry.partition, 4) if kind == "Schedule1F1B" else 4
        # An output may be on its way; and torch keeps those of the model to the end.
        outputs = (4 - alive) * 64 if entry.partition == n - 1 else 64
        assert alive * kept <= entry.activations <= alive * kept + outputs
        assert entry.parts["weights"] == weights
        assert entry.parts["gradients"] in (0, weights)
    names = {(layer.partition, layer.name) for layer in found.layers}
    assert {(j, f"blocks.{j}") for j in range(n)} <= names
    assert all(layer.kept_bytes > 0 for layer in plan.costs.layers if "blocks" in layer.name)


def test_memory_of_split_backwards(recorded):
    """Between the parts of a backward, the gradients that weights wait for are there, and count."""
    with open_run(recorded[0] / "ScheduleInterleavedZeroBubble") as run:
        found = analyse(run).memory
    assert found is not None
    weights = {entry.partition: entry.parts["weights"] for entry in found.partitions}
    assert any(
        parts[1] > weights[curve.partition] for curve in found.curves for parts in zip(*curve.values, strict=True)
    )
