"""Ten thousand steps, then ten thousand failing forwards: memory and threads must stay flat.

What is compared:

    quarters of a run   | warming up | reference |    | judged |
"""

import argparse
import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import ROOT, Options
from benchmarks.tables import Cell, Table, publish

__all__ = ["run"]

STATUS = Path("/proc/self/status")
SAMPLES = 20
WIDTH = 32
SLACK_MIB = 4.0
SLACK_RATIO = 1.02
RESULT = "result: "
"""Before the line that the process hands to the table."""


def run(options: Options) -> bool:
    """Soak in a process of its own, which nothing else has grown; return whether it stayed flat."""
    if not STATUS.exists():
        print(f"skipped: needs {STATUS}")
        return True
    steps = {"quick": 400, "brief": 2_000, "full": 10_000}[options.size]
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", str(steps)]
    rows: list[list[Cell]] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith(RESULT):
                rows.append(json.loads(line.removeprefix(RESULT)))
            else:
                print(line, end="", flush=True)
    columns = [
        "soak",
        "MiB, second quarter",
        "MiB, last quarter",
        "threads more",
        f"at most {SLACK_RATIO} x or +{SLACK_MIB:.0f} MiB",
    ]
    publish(Table("Memory and threads of a long run", columns, rows))
    return process.returncode == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What the process held after so many steps."""

    steps: int
    rss_mib: float
    threads: int

    @classmethod
    def take(cls, steps: int) -> "Sample":
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return cls(steps, int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"]))


class Fragile(nn.Module):
    """A layer that fails while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise ArithmeticError("broken on purpose")
        return x


def pipeline(package: str, checkpoint: str) -> Any:
    """Two partitions of a linear layer, a layer that can fail, ReLU and dropout each."""
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), Fragile(), nn.ReLU(), nn.Dropout(0.1))]
    return importlib.import_module(package).GPipe(
        nn.Sequential(*layers), [4, 4], devices=["cpu", "cpu"], chunks=4, checkpoint=checkpoint
    )


def training(package: str) -> Callable[[int], None]:
    """A step that trains one of two models in turn, for their checkpoint modes differ."""
    models = [pipeline(package, "always"), pipeline(package, "except_last")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    x, target = torch.randn(16, WIDTH), torch.randn(16, WIDTH)

    def step(number: int) -> None:
        model, optimizer = models[number % 2], optimizers[number % 2]
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x), target))
        optimizer.step()

    return step


def failing(package: str) -> Callable[[int], None]:
    """A forward that fails in one partition or the other; now and then one that must not fail."""
    model = pipeline(package, "except_last")
    fragile = [layer for layer in model.modules() if isinstance(layer, Fragile)]
    x = torch.randn(16, WIDTH)

    def step(number: int) -> None:
        broken = fragile[number % 2]
        broken.broken = True
        try:
            model(x)
        except ArithmeticError:
            pass
        else:
            raise RuntimeError(f"forward {number} did not fail")
        finally:
            broken.broken = False
        if number % 100 == 0:
            model(x).sum().backward()

    return step


def soak(title: str, step: Callable[[int], None], steps: int) -> bool:
    """Run the steps, print what the process held on the way, and judge it."""
    print(f"\nSoak: {steps} {title}\n  {'steps':>7}  {'RSS, MiB':>9}  threads", flush=True)
    samples = []
    every = max(1, steps // SAMPLES)
    for number in range(1, steps + 1):
        step(number)
        if number % every == 0:
            samples.append(sample := Sample.take(number))
            print(f"  {sample.steps:7}  {sample.rss_mib:9.1f}  {sample.threads:7}", flush=True)
    quarter = len(samples) // 4
    reference, judged = samples[quarter : 2 * quarter], samples[-quarter:]
    before = statistics.median(sample.rss_mib for sample in reference)
    after = statistics.median(sample.rss_mib for sample in judged)
    threads = max(s.threads for s in judged) - max(s.threads for s in reference)
    flat = after <= max(before * SLACK_RATIO, before + SLACK_MIB) and threads <= 0
    row = [f"{steps:,} {title}", round(before, 1), round(after, 1), threads, "met" if flat else "NOT MET"]
    print(RESULT + json.dumps(row), flush=True)
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--package", default="pipesight", help="pipesight, or torchgpipe to see the peer's")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    titles = "training steps, checkpoints always and except_last in turn", "failing forwards"
    trained = soak(titles[0], training(chosen.package), chosen.steps)
    failed = soak(titles[1], failing(chosen.package), chosen.steps)
    return 0 if trained and failed else 1


if __name__ == "__main__":
    sys.exit(main())
