"""Peaks of memory: predicted for settings that were never run, from one recorded run, beside those that were measured.

On GPUs, which partitions share if there are too few, the measure is `torch.cuda.max_memory_allocated`. Elsewhere it is
what the recording counts at the ends of tasks.
"""

import gc
import itertools
import json
import tempfile
from collections.abc import Sequence
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
from pipesight.plan import Measured, Schedule, measure, recomputed, recorded
from pipesight.report import analyse, open_run
from pipesight.schedule.argument_checks import CheckpointMode
from pipesight.schedule.memory import device_bytes
from pipesight.schedule.worker_orders import worker_orders

__all__ = ["run"]

LIMIT_ERROR = 0.05
LIMIT_SHARE = 0.05
STEPS = 3
CHECKPOINTS: tuple[CheckpointMode, ...] = ("never", "except_last", "always")


@dataclass(frozen=True)
class Scale:
    """How large the model and its batch are."""

    width: int
    length: int
    samples: int
    vocabulary: int


SMALL, LARGE = Scale(64, 64, 24, 100), Scale(1024, 512, 24, 8192)
BLOCKS = 8


@dataclass(frozen=True)
class Case:
    """A setting: steps of a `Pipeline`, or calls of a `GPipe` with a loss outside."""

    engine: str
    schedule: str
    balance: tuple[int, ...]
    chunks: int
    checkpoint: CheckpointMode

    def __str__(self) -> str:
        balance = "-".join(map(str, self.balance))
        return f"{self.engine} {self.schedule}, {balance}, {self.chunks} chunks, {self.checkpoint}"


RECORDED = Case("step", "1f1b", (5, 5), 4, "never")


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


def cases(quick: bool) -> list[Case]:
    """Return schedules, balances, chunks and checkpoint modes; none of them is the recorded one."""
    balances = [(5, 5), (3, 7), (2, 4, 4), (4, 3, 3), (1, 3, 3, 3), (10,)]
    engines = (("step", "1f1b"), ("call", "gpipe"), ("step", "gpipe"))
    every = itertools.product(engines, balances, (3, 6), CHECKPOINTS)
    found = [Case(engine, name, balance, chunks, mode) for (engine, name), balance, chunks, mode in every]
    found = [case for case in found if case != RECORDED]
    found += [Case("step", "zero-bubble", balance, 6, "never") for balance in balances[:-1]]
    return found[:: 12 if quick else 4 if torch.cuda.is_available() else 1]


@dataclass
class Inside(Observer):
    """Notes what was allocated on a GPU when tasks began and ended, and at most in between."""

    found: dict[str, list[int]] = field(default_factory=dict)

    def task_started(self, where: Where) -> None:
        """Begin to look for the most."""
        assert where.device is not None
        self.begin(where.device)

    def task_ended(self, where: Where) -> None:
        """Note it."""
        assert where.device is not None
        self.end(where.device, f"{where.phase} {where.partition} {where.microbatch}")

    def begin(self, device: torch.device) -> None:
        """Begin to look for the most."""
        torch.cuda.reset_peak_memory_stats(device)
        self.start = torch.cuda.memory_allocated(device)

    def end(self, device: torch.device, name: str) -> None:
        """Note it."""
        most = torch.cuda.max_memory_allocated(device)
        self.found[name] = [self.start, most, torch.cuda.memory_allocated(device)]


def run(options: Options) -> bool:
    """Predict and measure; return whether all settings ran."""
    scale = LARGE if torch.cuda.is_available() else SMALL
    known = train(RECORDED, scale)
    print(json.dumps({"recorded": str(RECORDED), **known.details}))
    for layer in known.measured.costs.layers:
        print(layer)
    rows: list[list[Cell]] = []
    errors: list[float] = []
    for case in cases(options.quick):
        found = train(case, scale)
        guesses = predicted(case, known.measured)
        apart = [guess / peak - 1 for guess, peak in zip(guesses, found.peaks, strict=True)]
        worst = max(apart, key=abs)
        errors += apart
        rows.append([str(case), size(max(guesses)), size(max(found.peaks)), f"{worst:+.1%}"])
        if torch.cuda.is_available():
            print(json.dumps({"case": str(case), "predicted": guesses, **found.details}))
    close = sum(abs(error) <= LIMIT_ERROR for error in errors) / max(len(errors), 1)
    where = "GPUs, max_memory_allocated" if torch.cuda.is_available() else "CPU, at the ends of tasks"
    columns = ["setting", "predicted, largest", "measured, largest", "error of the worst device"]
    note = f"From one run: {RECORDED}. Measured on {where}."
    publish(Table("Peak memory of settings that were not recorded", columns, rows, note))
    far = 1 - close
    show_limit(f"share of {len(errors)} peaks that are further than 5% off", far, LIMIT_SHARE, met=far <= LIMIT_SHARE)
    return bool(rows)


def places(count: int) -> list[torch.device]:
    """Return a device for each partition."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")] * count
    gpus = torch.cuda.device_count()
    return [torch.device("cuda", j * gpus // count if gpus < count else j) for j in range(count)]


def predicted(case: Case, known: Measured) -> tuple[float, ...]:
    """Return the peak of each device."""
    return device_bytes(order(case), known.costs, case.balance, parameter_scale=known.parameter_scale or 2.0)


def order(case: Case) -> Schedule:
    """Return what the workers of one process do."""
    again = recomputed(case.checkpoint, case.chunks)
    gpus = [device if device.type == "cuda" else None for device in places(len(case.balance))]
    tasks = worker_orders(case.schedule, case.chunks, gpus, recompute=again).tasks
    rows = np.full((len(tasks), max(map(len, tasks)), 3), -1, np.int32)
    for row, own in zip(rows, tasks, strict=True):
        row[: len(own)] = [(kind, j, i) for kind, i, j in own]
    return recorded(rows)


@dataclass
class Trained:
    """What was measured."""

    peaks: Sequence[float]
    measured: Measured
    details: dict[str, Any]


def train(case: Case, scale: Scale) -> Trained:
    """Train a few steps; return the peak of each device, and what was measured."""
    torch.manual_seed(0)
    devices = places(len(case.balance))
    on_gpus = devices[0].type == "cuda"
    gc.collect()
    base = torch.cuda.memory_allocated(0) if on_gpus else 0
    with torch.device(devices[0]):
        model = model_of(scale)
        x = torch.randint(0, scale.vocabulary, (scale.samples, scale.length))
    y = torch.randint(0, scale.vocabulary, (scale.samples, scale.length), device=devices[-1])
    common: dict[str, Any] = {"devices": devices, "chunks": case.chunks, "checkpoint": case.checkpoint}
    pipe: Any
    if case.engine == "step":
        pipe = Pipeline(model, balance=case.balance, schedule=case.schedule, loss_fn=loss_of, **common)
    else:
        pipe = GPipe(model, case.balance, **common)
    optimizer = torch.optim.Adam(pipe.parameters())
    inside = Inside()

    def step() -> None:
        optimizer.zero_grad()
        if case.engine == "step":
            pipe.step(x, target=y)
        else:
            loss_of(pipe(x), y).backward()

    with tempfile.TemporaryDirectory() as folder:
        with observe(Path(folder) / "RUN", logs=None):
            for _ in range(STEPS):
                step()
                optimizer.step()
        with open_run(Path(folder) / "RUN") as opened:
            measured, memory = measure(opened), analyse(opened).memory
    assert memory is not None
    if not on_gpus:
        return Trained([float(entry.peak) for entry in memory.partitions], measured, {})
    own = sorted({*devices}, key=str)
    for device in own:
        torch.cuda.reset_peak_memory_stats(device)
    step()
    optimizer.step()
    peaks = [float(torch.cuda.max_memory_allocated(device)) for device in own]
    attach(inside)
    step()
    detach(inside)
    inside.begin(devices[0])
    optimizer.step()
    inside.end(devices[0], "optimizer")
    details = {
        "peaks": peaks,
        "base": base,
        "inputs": x.nbytes + y.nbytes,
        "devices": [[entry.peak, dict(entry.parts), entry.allocated, entry.allocator_peak] for entry in memory.devices],
        "partitions": [[entry.peak, dict(entry.parts)] for entry in memory.partitions],
        "inside": inside.found,
    }
    return Trained(peaks, measured, details)
