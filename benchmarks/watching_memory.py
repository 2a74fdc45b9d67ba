"""The memory that watching takes, beside the same training unwatched.

Every activation and gradient is watched at each step. Memory should depend neither on the size of a tensor nor on how
many there are. To measure one case, on a GPU if there is one:

    python -m benchmarks.watching_memory cuda:0 bfloat16 16 2048 plain
"""

import contextlib
import ctypes
import gc
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import ROOT, Options
from benchmarks.tables import Cell, Table, publish, show_limit

__all__ = ["run"]

WIDTH, STEPS = 512, 2
LIMIT = {"cpu": 32, "cuda": 8}  # MiB
MMAP_THRESHOLD = -3  # of glibc's malloc.h
SIX = ["min", "max", "mean", "std", "l1_norm", "l2_norm"]
CASES: dict[str, dict[str, Any]] = {
    "six statistics": {"LogTensorStats": {"stats": SIX}},
    "zeros and the smallest": {"LogTensorStats": {"stats": ["zeros%", "dynamic_range"]}},
    "casts": {"transformer_engine": {"LogFp8TensorStats": {"stats": ["mxfp8_mse"]}}},
}


def run(options: Options) -> bool:
    """Measure; return whether no case crashed."""
    sound = True
    for device in ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]:
        rows: list[list[Cell]] = []
        for dtype, layers, batch, kind in (
            *(("float32", 8, 2048, "plain"), ("float32", 32, 2048, "plain"), ("float32", 8, 16384, "plain")),
            *(("bfloat16", 8, 16384, "plain"), ("float32", 8, 16384, "pipeline")),
        )[: 2 if options.quick else None]:
            found = ask(device, dtype, layers, batch, kind)
            sound &= found is not None
            if found is None:
                continue
            mebibytes = batch * WIDTH * getattr(torch, dtype).itemsize / 2**20
            what = f"{dtype}, {layers} layers, {kind}, tensors of {mebibytes:.0f} MiB"
            rows.append([what, round(found["unwatched"]), *(round(found[case]) for case in CASES)])
        publish(Table(f"Watching, {device}: MiB at peak", ["training", "unwatched", *(f"+ {c}" for c in CASES)], rows))
        most = max((cell for row in rows for cell in row[2:] if isinstance(cell, int)), default=0)
        limit = LIMIT[device.partition(":")[0]]
        show_limit(f"most that watching adds on {device}, MiB", most, limit, met=most <= limit)
    return sound


def ask(*arguments: object) -> dict[str, float] | None:
    """Measure a case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.watching_memory", *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout) if ended.returncode == 0 else None


class Scale(nn.Module):
    """A layer with tensors as large as those of others, and little to compute."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Training:
    """Steps of a stack of layers."""

    def __init__(self, device: str, dtype: str, layers: int, batch: int, kind: str) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        options: dict[str, Any] = {"device": self.device, "dtype": getattr(torch, dtype)}
        self.model: nn.Module = nn.Sequential(*(Scale(options) for _ in range(layers)))
        if kind == "pipeline":
            from pipesight import GPipe

            self.model = GPipe(self.model, [layers // 4] * 4, devices=[self.device] * 4, chunks=4)
        self.x = torch.randn(batch, WIDTH, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def peak(self) -> float:
        """Train some steps; return the most memory in use meanwhile, in MiB."""
        gc.collect()
        self.step()
        reset(self.device)
        for _ in range(STEPS):
            self.step()
        return peak(self.device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()


def reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**10


def watched(training: Training, features: dict[str, Any], folder: str) -> contextlib.AbstractContextManager[object]:
    from pipesight.stats import watch

    section: dict[str, Any] = {"enabled": True, "layers": {"layer_types": "all"}}
    for name, settings in features.items():
        every: dict[str, Any] = {"enabled": True, "tensors": ["activation", "gradient"]}
        inner = {key: {**every, **value} for key, value in settings.items() if isinstance(value, dict)}
        section[name] = inner or {**every, **settings}
    return watch(training.model, {"all": section}, log_dir=folder)


def main(device: str, dtype: str, layers: str, batch: str, kind: str) -> None:
    """Print what training takes, and what each case of watching adds, as JSON."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)  # what is freed is no longer resident
    with tempfile.TemporaryDirectory() as folder:
        training = Training(device, dtype, int(layers), int(batch), kind)
        importlib.import_module("pipesight.stats.model_watch")  # code is no part of it
        unwatched = training.peak()
        found = {"unwatched": unwatched}
        for case, features in CASES.items():  # with what those before leave behind
            with watched(training, features, folder):
                found[case] = training.peak() - unwatched
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
