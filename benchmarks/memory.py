"""Peaks of memory: predicted for settings that were never run, from one recorded run, beside those that were measured.

On GPUs, as many as partitions, the measure is `torch.cuda.max_memory_allocated`. Elsewhere it is what the recording
counts at the ends of tasks.
"""

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import Options
from benchmarks.tables import Cell, Table, publish, show_limit
from pipesight import Pipeline, observe
from pipesight._formatting import size
from pipesight.plan import Measured, Setting, measure, predict
from pipesight.report import analyse, open_run
from pipesight.schedule.argument_checks import CheckpointMode

__all__ = ["run"]

WIDTH, LENGTH, SAMPLES, CLASSES = 64, 64, 24, 10
LIMIT_ERROR = 0.05
LIMIT_SHARE = 0.05
RECORDED: tuple[str, tuple[int, ...], int, CheckpointMode] = ("1f1b", (5, 5), 4, "never")
CHECKPOINTS: tuple[CheckpointMode, ...] = ("never", "except_last", "always")


class Head(nn.Module):
    """Classifies the mean of a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        scores: torch.Tensor = self.out(self.norm(x).mean(1))
        return scores


def model_of(width: int) -> nn.Sequential:
    """Return transformer blocks, of which every third is wider, between an embedding and a head."""
    blocks = [
        nn.TransformerEncoderLayer(width, 4, width * (6 if k % 3 == 2 else 2), dropout=0.1, batch_first=True)
        for k in range(8)
    ]
    return nn.Sequential(nn.Embedding(100, width), *blocks, Head(width))


def settings(quick: bool) -> list[tuple[str, tuple[int, ...], int, CheckpointMode]]:
    """Return schedules, balances, chunks and checkpoint modes; none of them is the recorded one."""
    balances = [(5, 5), (3, 7), (2, 4, 4), (4, 3, 3), (1, 3, 3, 3)]
    every = itertools.product(("gpipe", "1f1b"), balances, (3, 6), CHECKPOINTS)
    found = [one for one in every if one != RECORDED]
    found += [("zero-bubble", balance, 6, "never") for balance in balances]
    return found[::8] if quick else found


def run(options: Options) -> bool:
    """Predict and measure; return whether all settings ran."""
    width = 1024 if torch.cuda.is_available() else WIDTH
    recorded = record(RECORDED, width)[1]
    scale = recorded.parameter_scale or 2.0
    rows: list[list[Cell]] = []
    errors: list[float] = []
    for setting in settings(options.quick):
        schedule, balance, chunks, checkpoint = setting
        if torch.cuda.is_available() and torch.cuda.device_count() < len(balance):
            continue
        plan = predict(
            recorded.costs, Setting(schedule, len(balance), chunks, checkpoint), balance, parameter_scale=scale
        )
        peaks, _ = record(setting, width)
        found = [guess / peak - 1 for guess, peak in zip(plan.memory_bytes, peaks, strict=True)]
        worst = max(found, key=abs)
        errors += found
        what = f"{schedule}, {'-'.join(map(str, balance))}, {chunks} chunks, {checkpoint}"
        rows.append([what, size(max(plan.memory_bytes)), size(max(peaks)), f"{worst:+.1%}"])
    close = sum(abs(error) <= LIMIT_ERROR for error in errors) / max(len(errors), 1)
    where = "GPUs, max_memory_allocated" if torch.cuda.is_available() else "CPU, at the ends of tasks"
    note = f"From one run: {RECORDED[0]}, {RECORDED[1]}, {RECORDED[2]} chunks, {RECORDED[3]}. Measured on {where}."
    columns = ["setting", "predicted, largest", "measured, largest", "error of the worst partition"]
    publish(Table("Peak memory of settings that were not recorded", columns, rows, note))
    far = 1 - close
    show_limit(f"share of {len(errors)} peaks that are further than 5% off", far, LIMIT_SHARE, met=far <= LIMIT_SHARE)
    return bool(rows) or torch.cuda.is_available()


def record(setting: tuple[str, tuple[int, ...], int, CheckpointMode], width: int) -> tuple[Sequence[float], Measured]:
    """Train a few steps; return the peak of each partition, and what was measured."""
    schedule, balance, chunks, checkpoint = setting
    torch.manual_seed(0)
    on_gpus = torch.cuda.is_available()
    devices = [f"cuda:{j % torch.cuda.device_count()}" if on_gpus else "cpu" for j in range(len(balance))]
    pipe = Pipeline(
        model_of(width),
        balance=balance,
        devices=devices,
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        loss_fn=nn.functional.cross_entropy,
    )
    optimizer = torch.optim.Adam(pipe.parameters())
    x = torch.randint(0, 100, (SAMPLES, LENGTH), device=devices[0])
    y = torch.randint(0, CLASSES, (SAMPLES,), device=devices[-1])
    with tempfile.TemporaryDirectory() as folder:
        with observe(Path(folder) / "RUN", logs=None):
            for k in range(4):
                optimizer.zero_grad()
                pipe.step(x, target=y)
                optimizer.step()
                if k == 0 and on_gpus:
                    for device in devices:
                        torch.cuda.reset_peak_memory_stats(device)
        with open_run(Path(folder) / "RUN") as opened:
            measured, memory = measure(opened), analyse(opened).memory
    assert memory is not None
    if on_gpus:
        return [float(torch.cuda.max_memory_allocated(device)) for device in devices], measured
    return [float(entry.peak) for entry in memory.partitions], measured
