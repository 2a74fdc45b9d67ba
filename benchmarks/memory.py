"""Peaks of memory: predicted for settings that were never run, from one recorded run, beside those that were measured.

On GPUs, which partitions share if there are too few, the measure is `torch.cuda.max_memory_allocated` of a step that
nobody observes. Elsewhere it is what the recording counts at the ends of tasks.
"""

import contextlib
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Options
from benchmarks.tables import Cell, Table, publish, show_limit
from pipesight import GPipe, Pipeline, observe
from pipesight._formatting import size
from pipesight.context import Observer, Where, attach, detach
from pipesight.pipeline.call_costs import profile_call
from pipesight.plan import Costs, Measured, Schedule, measure, recomputed, recorded
from pipesight.report import analyse, open_run
from pipesight.schedule.argument_checks import CheckpointMode
from pipesight.schedule.memory import device_bytes
from pipesight.schedule.task_orders import B, F, R
from pipesight.schedule.worker_orders import gpipe_tasks, worker_orders

__all__ = ["run"]

LIMIT_ERROR = 0.05
LIMIT_SHARE = 0.05
LIMIT_SECONDS = 110.0
STEPS = 3
CHECKPOINTS: tuple[CheckpointMode, ...] = ("never", "except_last", "always")


@dataclass(frozen=True)
class Scale:
    """How large the model and its batch are."""

    width: int
    length: int
    samples: int
    vocabulary: int
    dtype: torch.dtype


SMALL = Scale(64, 64, 24, 100, torch.float32)
LARGE = Scale(768, 1024, 24, 50257, torch.bfloat16)
"""GPT-2's, with eight blocks."""
BLOCKS = 8
LAYERS = BLOCKS + 2


@dataclass(frozen=True)
class Case:
    """A setting: steps of a `Pipeline`, of layers or of GPT-2 as transformers has it, or calls of a `GPipe`."""

    engine: str
    schedule: str
    balance: tuple[int, ...]
    chunks: int
    checkpoint: CheckpointMode

    def __str__(self) -> str:
        balance = "-".join(map(str, self.balance))
        return f"{self.engine} {self.schedule}, {balance}, {self.chunks} chunks, {self.checkpoint}"


RECORDED = {
    "step": Case("step", "1f1b", (5, 5), 4, "never"),
    "call": Case("call", "gpipe", (5, 5), 4, "never"),
    "GPT-2": Case("GPT-2", "1f1b", (5, 5), 4, "never"),
}


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.tokens = nn.Embedding(scale.vocabulary, scale.width)
        self.places = nn.Parameter(torch.zeros(scale.length, scale.width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors of tokens."""
        found: Tensor = self.tokens(x) + self.places
        return found


class Block(nn.Module):
    """A transformer block; every third is wider."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, wide), nn.Linear(wide, width)
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention and MLP, each added to what it was given."""
        parts = self.attention(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.outer(nn.functional.gelu(self.inner(self.norms[1](x))))
        return found


def model_of(scale: Scale) -> nn.Sequential:
    """Return blocks between an embedding and a head."""
    blocks = [Block(scale.width, scale.width * (6 if k % 3 == 2 else 4)) for k in range(BLOCKS)]
    head = nn.Sequential(nn.LayerNorm(scale.width), nn.Linear(scale.width, scale.vocabulary))
    return nn.Sequential(Embedding(scale), *blocks, head)


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy over all tokens."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def cases(engine: str, *, all_of_them: bool) -> list[Case]:
    """Return schedules, balances, chunks and checkpoint modes; none of them is the recorded one."""
    balances = [(5, 5), (3, 7), (2, 4, 4), (4, 3, 3), (1, 3, 3, 3), (LAYERS,)]
    schedules = ("gpipe",) if engine == "call" else ("1f1b", "gpipe")
    every = itertools.product(schedules, balances, (3, 6), CHECKPOINTS)
    found = [Case(engine, name, balance, chunks, mode) for name, balance, chunks, mode in every]
    if not all_of_them:
        found = found[:: 7 if engine != "call" else 5]
    if engine == "step":
        split = [Case(engine, "zero-bubble", balance, 6, "never") for balance in balances[:-1]]
        found += split if all_of_them else split[:2]
    return [case for case in found if case != RECORDED[engine]]


class Gauge:
    """What the allocators of GPUs say."""

    def __init__(self) -> None:
        self.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0

    def places(self, count: int) -> list[torch.device]:
        """Return a device for each partition."""
        if not self.gpus:
            return [torch.device("cpu")] * count
        return [torch.device("cuda", j * self.gpus // count if self.gpus < count else j) for j in range(count)]

    def start(self, device: torch.device) -> int:
        """Look for the most from now on; return what is in use."""
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def now_and_most(self, device: torch.device) -> tuple[int, int]:
        """Return what is in use, and the most since the start."""
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


gauge = Gauge()


@dataclass
class Inside(Observer):
    """Notes what was in use on a GPU when tasks began, at most in between, and when they ended."""

    found: dict[str, list[int]] = field(default_factory=dict)

    def task_started(self, where: Where) -> None:
        """Begin to look for the most."""
        assert where.device is not None
        self.start = gauge.start(where.device)

    def task_ended(self, where: Where) -> None:
        """Note it."""
        assert where.device is not None
        now, most = gauge.now_and_most(where.device)
        self.found[f"{where.phase} {where.partition} {where.microbatch}"] = [self.start, most, now]


def run(options: Options) -> bool:
    """Predict and measure; return whether all settings ran."""
    scale, began = LARGE if gauge.gpus else SMALL, time.perf_counter()
    rows: list[list[Cell]] = []
    errors: list[float] = []
    left_out = 0
    for engine in ("step",) if options.quick else RECORDED:
        known = recording(RECORDED[engine], scale)
        sources = {"": known.measured.costs}
        if gauge.gpus and engine == "GPT-2":
            sources |= {"--model: ": of_model(scale)}
        if gauge.gpus:
            print(json.dumps({"recorded": str(RECORDED[engine]), **known.details}))
            for layer in known.measured.costs.layers:
                print(layer)
        for case in cases(engine, all_of_them=options.size == "full" and not gauge.gpus):
            if time.perf_counter() - began > LIMIT_SECONDS and gauge.gpus:
                left_out += 1
                continue
            peaks, details = measured_of(case, scale)
            for source, costs in sources.items():
                scale_of = 4.0 if source else known.measured.parameter_scale or 2.0
                guesses = predicted(case, costs, scale_of)
                apart = [guess / peak - 1 for guess, peak in zip(guesses, peaks, strict=True)]
                worst = max(apart, key=abs)
                errors += apart
                rows.append([source + str(case), size(max(guesses)), size(max(peaks)), f"{worst:+.1%}"])
            if gauge.gpus:
                print(json.dumps({"case": str(case), "predicted": guesses, "peaks": peaks, **details}), flush=True)
    close = sum(abs(error) <= LIMIT_ERROR for error in errors) / max(len(errors), 1)
    where = "GPUs, max_memory_allocated" if gauge.gpus else "CPU, at the ends of tasks"
    columns = ["setting", "predicted, largest", "measured, largest", "error of the worst device"]
    note = f"From one run of each kind, such as {RECORDED['step']}. Measured on {where}."
    note += f" Left out, for want of time: {left_out}." if left_out else ""
    publish(Table("Peak memory of settings that were not recorded", columns, rows, note))
    far = 1 - close
    show_limit(f"share of {len(errors)} peaks that are further than 5% off", far, LIMIT_SHARE, met=far <= LIMIT_SHARE)
    return bool(rows)


def of_model(scale: Scale) -> Costs:
    """Return what `plan --model` knows of GPT-2."""
    with torch.device(gauge.places(1)[0]):
        model, x = gpt2(scale), torch.randint(0, scale.vocabulary, (scale.samples, scale.length))
    return profile_call(model.to(dtype=scale.dtype), (), {"input_ids": x, "labels": x}, timeout=0.5)


def predicted(case: Case, costs: Costs, parameter_scale: float) -> tuple[float, ...]:
    """Return the peak of each device."""
    balance = list(case.balance)
    if case.engine == "GPT-2":  # the first block has two embeddings and a dropout, and the last a norm and the head
        balance[0] += 2
        balance[-1] += 1
    return device_bytes(order(case), costs, balance, parameter_scale=parameter_scale)


def order(case: Case) -> Schedule:
    """Return what the workers of one process do."""
    again, devices = recomputed(case.checkpoint, case.chunks), gauge.places(len(case.balance))
    if case.engine == "call":
        shares: dict[object, tuple[int, ...]] = {}
        for j, device in enumerate(devices):
            key = device if gauge.gpus else j
            shares[key] = (*shares.get(key, ()), j)
        tasks = [called(share, case.chunks, again) for share in shares.values()]
    else:
        gpus = [device if gauge.gpus else None for device in devices]
        found = worker_orders(case.schedule, case.chunks, gpus, recompute=again).tasks
        tasks = [[(kind, j, i) for kind, i, j in own] for own in found]
    rows = np.full((len(tasks), max(map(len, tasks)), 3), -1, np.int32)
    for row, own in zip(rows, tasks, strict=True):
        row[: len(own)] = own
    return recorded(rows)


def called(share: tuple[int, ...], chunks: int, again: Sequence[bool]) -> list[tuple[int, int, int]]:
    """Return what a worker does in a call, and in its backward."""
    found = [(F, j, i) for i, j in gpipe_tasks(F, chunks, share)]
    for i, j in gpipe_tasks(B, chunks, share):
        found += [(R, j, i), (B, j, i)] if again[i] else [(B, j, i)]
    return found


@dataclass
class Training:
    """Steps of a case."""

    devices: list[torch.device]
    step: Callable[[], None]
    optimizer: torch.optim.Optimizer

    def run(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.step()
        self.optimizer.step()


@contextlib.contextmanager
def training(case: Case, scale: Scale) -> Iterator[Training]:
    """Make a model, and what trains it."""
    torch.manual_seed(0)
    if torch.cuda.is_available():  # those of threads that have ended would count
        torch._C._cuda_clearCublasWorkspaces()
    devices = gauge.places(len(case.balance))
    with torch.device(devices[0]):
        model: nn.Module = gpt2(scale) if case.engine == "GPT-2" else model_of(scale)
    model = model.to(devices[0], scale.dtype)
    x = torch.randint(0, scale.vocabulary, (scale.samples, scale.length), device=devices[0])
    y = torch.randint(0, scale.vocabulary, (scale.samples, scale.length), device=devices[-1])
    common: dict[str, Any] = {"devices": devices, "chunks": case.chunks, "checkpoint": case.checkpoint}
    pipe: Any
    if case.engine == "GPT-2":
        cuts = [f"transformer.h.{end - 1}" for end in np.cumsum(case.balance)[:-1].tolist()]
        pipe = Pipeline(model, cuts, schedule=case.schedule, **common)
    elif case.engine == "step":
        pipe = Pipeline(model, balance=case.balance, schedule=case.schedule, loss_fn=loss_of, **common)
    else:
        assert isinstance(model, nn.Sequential)
        pipe = GPipe(model, case.balance, **common)
    model = nn.Identity()

    def step() -> None:
        if case.engine == "call":
            loss_of(pipe(x), y).backward()
        elif case.engine == "step":
            pipe.step(x, target=y)
        else:
            pipe.step(input_ids=x, labels=x)

    yield Training(devices, step, torch.optim.Adam(pipe.parameters(), foreach=bool(gauge.gpus) or None))


def gpt2(scale: Scale) -> nn.Module:
    """Return the model of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": scale.vocabulary, "n_positions": scale.length, "n_embd": scale.width}
    config = GPT2Config(**size, n_layer=BLOCKS, n_head=max(1, scale.width // 64), use_cache=False)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


@dataclass
class Known:
    """What a recorded run tells."""

    measured: Measured
    peaks: list[float]
    details: dict[str, Any]


def recording(case: Case, scale: Scale) -> Known:
    """Record some steps."""
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        with training(case, scale) as job, observe(Path(folder) / "RUN", logs=None):
            for _ in range(STEPS):
                job.run()
        with open_run(Path(folder) / "RUN") as opened:
            measured, memory = measure(opened), analyse(opened).memory
    assert memory is not None
    details = {
        "devices": [
            [entry.device, entry.peak, dict(entry.parts), entry.allocated, entry.allocator_peak, entry.outside]
            for entry in memory.devices
        ],
        "partitions": [[entry.peak, dict(entry.parts)] for entry in memory.partitions],
        "scales": [measured.parameter_scale, measured.costs.optimizer_scale],
        "other": [measured.costs.other_bytes, measured.costs.input_bytes, measured.costs.loss_bytes],
        "loss": str(measured.costs.loss_peak),
    }
    return Known(measured, [float(entry.peak) for entry in memory.partitions], details)


def measured_of(case: Case, scale: Scale) -> tuple[list[float], dict[str, Any]]:
    """Train a few steps; return the peak of each device."""
    if not gauge.gpus:
        return recording(case, scale).peaks, {}
    gc.collect()
    with training(case, scale) as job:
        own = sorted({*job.devices}, key=str)
        job.run()
        for device in own:
            gauge.start(device)
        job.run()
        peaks = [float(gauge.now_and_most(device)[1]) for device in own]
        inside = Inside()
        attach(inside)
        job.optimizer.zero_grad()
        job.step()
        detach(inside)
        before = gauge.start(own[0])
        job.optimizer.step()
        now, most = gauge.now_and_most(own[0])
    return peaks, {"inside": inside.found, "optimizer": [before, most, now]}
