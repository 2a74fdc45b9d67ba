"""What was in memory, beside what the plain model saves, and what the C library's allocator gave out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

import pipesight
from pipesight import GPipe, Pipeline
from pipesight._torch.saved_tensors import CAN_BE_SEEN
from pipesight.analysis.measured_memory import gradients_of
from pipesight.analysis.memory import MemoryReport
from pipesight.cli.command import main
from pipesight.pipeline.call_costs import profile_call
from pipesight.plan import Setting, measure, predict, profile
from pipesight.recording.memory import memory_recorder
from pipesight.recording.memory.machine_memory import machine_memory
from pipesight.report import analyse, open_run

pytestmark = pytest.mark.skipif(not CAN_BE_SEEN, reason="this torch does not tell what autograd keeps")

CHUNKS, SAMPLES, WIDTH = 6, 12, 16
CUTS = ["2", "4", "6"]


class Block(nn.Module):
    """Keeps more than its output: what a residual branch, an activation and dropout save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def model_of(blocks: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)])


def recorded(run: Path, step, model: nn.Module, steps: int = 2) -> MemoryReport:
    """Return what was counted while a model trained."""
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    with pipesight.observe(run, logs=None):
        for _ in range(steps):
            optimizer.zero_grad()
            step(x, y)
            optimizer.step()
    with open_run(run) as opened:
        found = analyse(opened).memory
    assert found is not None
    return found


def sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def kept_by(part: nn.Sequential) -> int:
    """Return the bytes that a plain call keeps for its backward, without its input and its weights."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor.detach()

    x = torch.randn(SAMPLES // CHUNKS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        part(x)
    known = sizes([x, *part.parameters()])
    return sum(size for address, size in sizes(saved).items() if address not in known)


def alive(schedule: str, j: int, n: int) -> int:
    """Return how many micro-batches a partition keeps at most, as textbooks say."""
    return {"gpipe": CHUNKS, "1f1b": min(n - j, CHUNKS), "interleaved-1f1b": CHUNKS}[schedule]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_activations_follow_the_schedule(tmp_path, schedule, checkpoint):
    """GPipe keeps all micro-batches, 1F1B one for each partition from here to the last, checkpointing one."""
    model = model_of()
    pipe = Pipeline(
        model,
        cuts=CUTS,
        devices=["cpu"] * 4,
        chunks=CHUNKS,
        checkpoint=checkpoint,
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
    )
    found = recorded(tmp_path / "run", lambda x, y: pipe.step(x, target=y), pipe)
    for entry in found.partitions:
        j = entry.partition
        kept = kept_by(model[2 * j : 2 * j + 2])
        loss = 2 * WIDTH * 4 if j == 3 else 0  # the output, which the loss keeps
        if checkpoint == "never":
            assert entry.activations == pytest.approx(alive(schedule, j, 4) * (kept + loss), abs=loss)
        else:  # in units, which the model calls itself, recomputed parts are kept outside of the graph
            most = 1 + (checkpoint == "except_last")
            assert kept * 0.5 <= entry.activations <= most * (kept + 8 * loss) + CHUNKS * loss
        weights = sum(sizes(model[2 * j : 2 * j + 2].parameters()).values())
        state = weights * 2 + 4 * len(list(model[2 * j : 2 * j + 2].parameters()))
        assert (entry.parts["weights"], entry.parts["optimizer_state"]) == (weights, state)
        assert entry.parts["gradients"] in (0, weights, 2 * weights)  # twice, while they are added to .grad


class Gated(nn.Module):
    """Keeps something outside of its blocks, which checkpointing does not drop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH)) for _ in "1234"
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * 0.5 * x
        return x


def test_what_is_kept_outside_of_blocks_counts_with_what_is_recomputed(tmp_path):
    """A block keeps as much of a micro-batch where its forward keeps a part and its recomputation the rest."""
    kept = []
    for checkpoint in ("never", "except_last"):
        pipe = Pipeline(
            Gated(), cuts=["blocks.2"], devices=["cpu", "cpu"], chunks=3, checkpoint=checkpoint, loss_fn=nn.MSELoss()
        )
        found = recorded(tmp_path / checkpoint, pipe.step, pipe)
        kept.append({layer.name: (layer.kept, layer.earlier, layer.both) for layer in found.layers})
    assert kept[0]["blocks.1"] == kept[1]["blocks.1"]
    assert kept[0]["blocks.3"] == kept[1]["blocks.3"]


@pytest.mark.parametrize(("checkpoint", "count"), [("never", CHUNKS), ("always", 1)])
def test_gpipe_keeps_all_or_one(tmp_path, checkpoint, count):
    """A layer is said to keep what it keeps in a plain model; inputs of checkpointed micro-batches stay."""
    model = model_of(4)
    pipe = GPipe(model, [2, 2], devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    found = recorded(tmp_path / "run", lambda x, y: nn.functional.mse_loss(pipe(x), y).backward(), pipe)
    assert [entry.activations for entry in found.partitions] == [
        count * kept_by(model[:2]),
        count * kept_by(model[2:]),
    ]
    boundary = SAMPLES * WIDTH * 4
    assert max(entry.parts["inputs"] for entry in found.partitions) == boundary
    assert [(layer.partition, layer.name) for layer in found.layers] == [(0, "0"), (0, "1"), (1, "2"), (1, "3")]
    for layer in found.layers:
        inner = layer.name in "13"  # then what it keeps of its input comes from a layer of the partition
        assert layer.kept - layer.both == kept_by(model[int(layer.name) : int(layer.name) + 1])
        assert layer.both == (SAMPLES // CHUNKS * WIDTH * 4 if inner else 0)


@pytest.mark.parametrize("engine", ["GPipe", "step"])
def test_plans_predict_what_is_then_measured(tmp_path, engine):
    """From one run, the peaks of other schedules, balances, chunks and checkpoint modes are known within 5%."""

    def run(name: str, schedule: str, balance: Sequence[int], chunks: int, checkpoint: str) -> Path:
        model = nn.Sequential(*[Block() for _ in range(6)], nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, 96)))
        devices = ["cpu"] * len(balance)
        x, y = torch.randn(24, 64, WIDTH), torch.randn(24, 64, 96)
        if engine == "GPipe":
            pipe = GPipe(model, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
        else:
            options = {"checkpoint": checkpoint, "schedule": schedule, "loss_fn": nn.functional.mse_loss}
            pipe = Pipeline(model, balance=balance, devices=devices, chunks=chunks, **options)
        optimizer = torch.optim.Adam(pipe.parameters())
        with pipesight.observe(tmp_path / name, logs=None):
            for _ in range(3):
                optimizer.zero_grad()
                if engine == "GPipe":
                    nn.functional.mse_loss(pipe(x), y).backward()
                else:
                    pipe.step(x, target=y)
                optimizer.step()
        return tmp_path / name

    with open_run(run("known", "gpipe", [3, 4], 4, "always")) as opened:
        known = measure(opened)
    assert known.parameter_scale == pytest.approx(4, rel=0.02)
    for schedule, balance, chunks, checkpoint in (
        ("gpipe", [4, 3], 8, "never"),
        ("gpipe", [2, 2, 3], 3, "except_last"),
        ("1f1b", [5, 2], 6, "never"),
        ("1f1b", [1, 2, 4], 6, "always"),
    ):
        if engine == "GPipe" and schedule != "gpipe":
            continue
        plan = predict(
            known.costs,
            Setting(schedule, len(balance), chunks, checkpoint),
            balance,
            parameter_scale=known.parameter_scale,
        )
        name = f"{schedule} {chunks} {checkpoint}"
        with open_run(run(name, schedule, balance, chunks, checkpoint)) as opened:
            found = analyse(opened).memory
        targets = [0] * (len(balance) - 1) + [24 * 64 * 96 * 4 if engine == "step" else 0]
        peaks = [entry.peak - more for entry, more in zip(found.partitions, targets, strict=True)]
        assert plan.memory_bytes == pytest.approx(peaks, rel=0.05)


@pytest.mark.parametrize(
    ("engine", "zero"),
    [("GPipe", "late"), ("GPipe", "kept"), ("GPipe", "twice"), ("step", "kept"), ("step", "twice"), ("step", "frozen")],
)
def test_gradients_that_stay_are_in_the_plan(tmp_path, engine, zero):
    """Gradients of an earlier mini-batch, not dropped before the forwards, are at the peak as predicted; frozen weights
    have none."""
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())])
    if zero == "frozen":
        for layer in model[::2]:
            layer.weight.requires_grad_(False)
    options = {"devices": ["cpu", "cpu"], "chunks": 4, "checkpoint": "never"}
    if engine == "GPipe":
        pipe = GPipe(model, [3, 3], **options)
    else:
        pipe = Pipeline(model, balance=[3, 3], schedule="gpipe", loss_fn=nn.functional.mse_loss, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), momentum=0.9)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    with pipesight.observe(tmp_path / "run", logs=None):
        for _ in range(4):
            if zero != "late":
                optimizer.zero_grad(set_to_none=zero != "kept")
            for _ in range(1 + (zero == "twice")):
                if engine == "step":
                    pipe.step(x, target=y)
                    continue
                loss = nn.functional.mse_loss(pipe(x), y)
                if zero == "late":
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
    with open_run(tmp_path / "run") as opened:
        found, known = analyse(opened).memory, measure(opened)
    plan = predict(known.costs, known.setting, known.balance, parameter_scale=known.parameter_scale)
    targets = [0, y.nbytes if engine == "step" else 0]
    assert plan.memory_bytes == pytest.approx(
        [entry.peak - more for entry, more in zip(found.partitions, targets, strict=True)], rel=0.005
    )


def test_gradients_that_go_are_not_in_the_plan(tmp_path):
    """Those that are dropped before the forwards, wherever steps are said to begin: a host is ahead of its GPU."""
    model = model_of(4)
    pipe = Pipeline(model, ["2"], devices=["cpu"] * 2, chunks=CHUNKS, schedule="1f1b", loss_fn=nn.functional.mse_loss)
    memory = recorded(tmp_path / "run", lambda x, y: pipe.step(x, target=y), pipe, steps=3)
    with open_run(tmp_path / "run") as opened:
        facts = measure(opened).facts
    ahead = 1 + CHUNKS // 2
    curves = [replace(one, steps=(*one.steps[ahead:], *one.steps[-1:] * ahead)) for one in memory.curves]
    late = [replace(one, steps=(*one.steps[:1] * ahead, *one.steps[:-ahead])) for one in memory.curves]
    for same in (memory.curves, curves, late):
        assert gradients_of(replace(memory, curves=tuple(same)), facts, 1) == pytest.approx((0.0, 1.0), abs=0.01)


def test_a_run_on_a_cpu_knows_what_the_machine_has(tmp_path):
    """The memory of the machine is shared by all partitions, beside what the process has for all else."""
    pipe = GPipe(model_of(), [4, 4], devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint="always")
    recorded(tmp_path / "run", lambda x, y: pipe(x).sum().backward(), pipe)
    with open_run(tmp_path / "run") as opened:
        limit = measure(opened).limit
    assert (limit.bytes, limit.shared, limit.replicas) == (machine_memory(), True, 1)
    own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert 0.5 * own < limit.besides <= 1.5 * own  # the model is small


def test_control_groups_limit_the_memory(tmp_path, monkeypatch):
    """The least limit of the group of the process and those around it counts, in both versions of control groups."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr("pipesight.recording.memory.machine_memory.GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr("pipesight.recording.memory.machine_memory.MOUNTED", tmp_path / "groups")
    assert machine_memory() == whole
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    (tmp_path / "groups/job/step/memory.max").write_text("max\n")
    assert machine_memory() == whole
    (tmp_path / "groups/job/memory.max").write_text("1048576\n")
    assert machine_memory() == 2**20
    (tmp_path / "cgroup").write_text("9:name=systemd:/\n4:memory:/other\n")
    (tmp_path / "groups/memory/other").mkdir(parents=True)
    (tmp_path / "groups/memory/other/memory.limit_in_bytes").write_text("524288\n")
    assert machine_memory() == 2**19


def test_v_half_keeps_less_than_1f1b(tmp_path):
    """The peak of V-Half is nearly half of that of 1F1B, in the sum over the partitions of a worker."""
    activations = {}
    for name in ("1f1b", "v-half"):
        pipe = Pipeline(
            model_of(),
            cuts=CUTS if name == "v-half" else ["4"],
            devices=["cpu"] * (4 if name == "v-half" else 2),
            chunks=CHUNKS,
            checkpoint="never",
            schedule=name,
            loss_fn=nn.functional.mse_loss,
        )
        found = recorded(tmp_path / name, lambda x, y, pipe=pipe: pipe.step(x, target=y), pipe)
        most = {entry.partition: entry.activations for entry in found.partitions}
        activations[name] = most[0] if name == "1f1b" else max(most.values())
    assert activations["v-half"] < activations["1f1b"]


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "abcdefghij")


def heap() -> int:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo
    found = function()
    return found.e + found.h  # bytes in mapped blocks, and in use otherwise


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc")
def test_a_plain_script_is_counted_like_the_allocator_does(tmp_path):
    """After forward, backward and the optimizer's step, what is counted changes as the heap does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(256, 512)
    heaps = []
    with pipesight.observe(tmp_path / "run", logs=None):
        for _ in range(3):
            optimizer.zero_grad()
            output = model(x)
            heaps.append(heap() - output.nbytes)  # nothing keeps the output for the backward
            output.sum().backward()
            del output
            heaps.append(heap())
            optimizer.step()
            heaps.append(heap())
    with open_run(tmp_path / "run") as opened:
        found = analyse(opened).memory
    assert found is not None
    (curve,) = found.curves
    totals = [sum(values) for values in zip(*curve.values, strict=True)]
    count = min(len(totals), len(heaps))
    assert count >= 6
    for k in range(1, count):
        assert totals[k] - totals[k - 1] == pytest.approx(heaps[k] - heaps[k - 1], abs=100_000)
    assert max(totals) - min(totals) > 10_000_000
    inner = 256 * 2048 * 4  # the input of GELU, and its output for the layer after it
    assert {layer.name: layer.kept for layer in found.layers} == {"0": 0, "1": inner, "2": inner}


class Remembers(torch.autograd.Function):
    """Keeps its input as it should, and more that hooks on saved tensors do not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.cosine, ctx.others = x.cos(), [x.exp(), None]
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.cosine


class Remembering(nn.Module):
    """Calls it."""

    def forward(self, x):
        return Remembers.apply(x)


def test_attributes_of_functions_count(tmp_path):
    """What a function of the program keeps in attributes is counted: in runs, and where a model is profiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Remembering())
    x = torch.randn(SAMPLES, WIDTH)
    profiled = [profile(model, x, timeout=0.0), profile_call(model, (x,), timeout=0.0)]
    assert [costs.layers[1].kept_bytes for costs in profiled] == [3 * x.nbytes] * 2
    pipe = GPipe(model, [2], devices=["cpu"], chunks=1, checkpoint="never")
    found = recorded(tmp_path / "run", lambda x, y: pipe(x).sum().backward(), pipe)
    assert found.layers[1].kept == 3 * x.nbytes


def test_what_a_program_packs_is_not_unpacked(tmp_path):
    """Counting runs no hook of the program: recomputation in a layer happens once, in the backward."""
    calls = []

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x):
            return recomputed(self._counted, x, use_reentrant=False)

        def _counted(self, x):
            calls.append(None)
            return self.inner(x)

    pipe = GPipe(nn.Sequential(Again(), Again()), [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint="never")
    recorded(tmp_path / "run", lambda x, y: nn.functional.mse_loss(pipe(x), y).backward(), pipe, steps=1)
    assert len(calls) == 2 * 2 * 2  # layers, micro-batches, forward and recomputation


def test_an_old_torch_is_named(tmp_path, monkeypatch, capsys):
    """Where PyTorch does not tell what is kept, nothing is counted, and the report says why."""
    monkeypatch.setattr(memory_recorder, "CAN_BE_SEEN", False)
    pipe = GPipe(model_of(2), [1, 1], devices=["cpu", "cpu"], chunks=2)
    plain = nn.Linear(4, 4)
    with pipesight.observe(tmp_path / "pipeline", logs=None):
        for _ in range(3):
            pipe(torch.randn(SAMPLES, WIDTH)).sum().backward()
    optimizer = torch.optim.SGD(plain.parameters())
    with pipesight.observe(tmp_path / "program", logs=None):
        for _ in range(3):
            plain(torch.randn(4, 4)).sum().backward()
            optimizer.step()
    for name in ("pipeline", "program"):
        with open_run(tmp_path / name) as opened:
            report = analyse(opened)
        assert report.memory is None
        assert main(["report", str(tmp_path / name)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"PyTorch {torch.__version__} does not tell what autograd keeps" in text


def test_counting_stays_within_its_share(monkeypatch):
    """Two steps are counted in any case; then so few that all of them together cost less than 1% of the time."""
    now, spent, counted = 0.0, 0.0, []
    monkeypatch.setattr(memory_recorder, "time", SimpleNamespace(perf_counter=lambda: now))
    recorder = memory_recorder.MemoryRecorder(SimpleNamespace(marks=None))
    for step in range(2000):
        recorder.switch(step, recorded=True)
        if recorder.wanted():
            recorder._spent += 0.02
            spent += 0.02
            counted.append(step)
            assert step < 2 or spent <= 0.01 * now
        now += 0.1
    assert counted[:2] == [0, 1]
    assert 8 <= len(counted) <= 100
