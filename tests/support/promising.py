"""Runs that deserve an advice, and the same with the advice taken: what the report promises, and what a watch says.

Most layers sleep for so many milliseconds, and so many for each sample. That takes no processor, so the times hold on a
busy machine, and as many partitions sleep at once as like to. Where processors matter, a few permits stand for them.

``cd tests; python -m support.promising`` prints the table of docs/how-to/act-on-losses.md.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pipesight
from pipesight import GPipe
from pipesight.analysis.analyse import analyse
from pipesight.analysis.planned_changes import Change
from pipesight.runs.reading.run import open_run
from support.torchrun import RANK, torchrun

STEPS, ROUNDS = 6, 7
SAMPLES = 16


class Processors:
    """A few processors that threads take turns on, slice by slice; a slice of another thread than before costs more."""

    def __init__(self, count: int, *, slice_: float = 0.003, switch: float = 0.0015) -> None:
        self._slice, self._switch = slice_, switch
        self._lock, self._waiting = threading.Lock(), collections.deque()
        self._free = [[0] for _ in range(count)]  # each with the thread that it ran last

    def work(self, seconds: float) -> None:
        """Compute for some seconds, in turns with other threads."""
        me = threading.get_ident()
        while seconds > 0:
            processor = self._take()
            time.sleep(min(seconds, self._slice) + self._switch * (processor[0] != me))
            processor[0] = me
            self._give(processor)
            seconds -= self._slice

    def _take(self) -> list[int]:
        with self._lock:
            if self._free:
                return self._free.pop()
            turn: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
            self._waiting.append(turn)
        return turn.get()

    def _give(self, processor: list[int]) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(processor)
            else:
                self._free.append(processor)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, work, forward, backward):
        ctx.work, ctx.backward = work, backward
        if type(x) is torch.Tensor:  # else only shapes are found out
            work((forward[0] + forward[1] * len(x)) / 1000)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.work((ctx.backward[0] + ctx.backward[1] * len(gradient)) / 1000)
        return gradient, None, None, None


class Sleeping(nn.Module):
    """A layer that takes milliseconds, and milliseconds a sample, forward and, unless it is said, twice that back."""

    def __init__(self, fixed=0.0, each=0.0, back=None, work=time.sleep) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._times = (work, (fixed, each), (2 * fixed, 2 * each) if back is None else back)

    def forward(self, x):
        return _Sleep.apply(x * self.weight, *self._times)


@dataclass(frozen=True)
class Kept:
    """What was promised, and what came of it: the seconds of a step before and after."""

    kind: str
    change: Change
    before: float
    after: float

    @property
    def promised(self) -> float:
        """The share of the step that the report said would be gained."""
        return self.change.gain

    @property
    def measured(self) -> float:
        """The share of the step that was gained."""
        return 1 - self.after / self.before

    def again(self, other: Kept) -> Kept:
        """Take the shortest steps of two turns, and the promise of the later one."""
        return Kept(self.kind, other.change, min(self.before, other.before), min(self.after, other.after))


def trained(folder: Path, layers, balance, *, loss=None, data=None, processors=64, **options) -> tuple[float, Path]:
    """Train and record; return the shortest step by the watch, and where the recording is.

    Layers that sleep take no less than they say, and more only if something else keeps the machine busy.
    """
    model = nn.Sequential(*layers)
    pipe = GPipe(model, balance, devices=["cpu"] * len(balance), **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    batches = iter(data) if data is not None else iter(lambda: torch.ones(SAMPLES, 4), None)
    begins = []
    with mock.patch.object(os, "sched_getaffinity", return_value={*range(processors)}), pipesight.observe(folder):
        for _ in range(STEPS):
            begins.append(time.perf_counter())
            x = next(batches)
            optimizer.zero_grad()
            output = pipe(x)
            (output.sum() if loss is None else loss(output)).backward()
            optimizer.step()
        begins.append(time.perf_counter())
    return min(b - a for a, b in itertools.pairwise(begins)), folder


def promised(run: Path, begins: str) -> Change:
    """Return the advice of a report that begins with some words.

    Raises:
        LookupError: There is none.
    """
    with open_run(run) as opened:
        changes = analyse(opened).verdict.changes
    for change in changes:
        if change.what.startswith(begins):
            return change
    raise LookupError(f"no advice begins with {begins!r} (advice: {changes})")


def kept(kind: str, begins: str, before: tuple[float, Path], after: tuple[float, Path]) -> Kept:
    """Compare the promise of one run with what another takes."""
    return Kept(kind, promised(before[1], begins), before[0], after[0])


def balance(folder: Path) -> Kept:
    """One layer takes twice as long as the other three."""
    layers = lambda: [Sleeping(each=k) for k in (6, 1, 1, 1)]
    before = trained(folder / "a", layers(), [3, 1], chunks=4, checkpoint="never")
    after = trained(folder / "b", layers(), [1, 3], chunks=4, checkpoint="never")
    return kept("balance", "balance=[1, 3] instead of [3, 1]", before, after)


def chunks(folder: Path) -> Kept:
    """Few micro-batches for four partitions; every task has a part that stays, so it is less than the most."""
    layers = lambda: [Sleeping(fixed=2, each=2) for _ in range(4)]
    before = trained(folder / "a", layers(), [1] * 4, chunks=2, checkpoint="never")
    change = promised(before[1], "chunks=")
    count = int(change.what.split("=")[1].split()[0])
    after = trained(folder / "b", layers(), [1] * 4, chunks=count, checkpoint="never")
    return Kept("chunks", change, before[0], after[0])


def checkpoint(folder: Path) -> Kept:
    """Everything is computed again."""
    layers = lambda: [Sleeping(each=2) for _ in range(2)]
    before = trained(folder / "a", layers(), [1, 1], chunks=8, checkpoint="always")
    after = trained(folder / "b", layers(), [1, 1], chunks=8, checkpoint="never")
    return kept("checkpoint", 'checkpoint="never"', before, after)


class _Chain(nn.Module):
    """Many operators with next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x * self.weight
        for _ in range(300):
            x = x + 1
        return x


def larger_microbatches(folder: Path) -> Kept:
    """Tasks of one sample each that take as long as those of two."""
    layers = lambda: [_Chain() for _ in range(2)]
    before = trained(folder / "a", layers(), [1, 1], chunks=16, checkpoint="never")
    change = promised(before[1], "larger micro-batches: chunks=")
    count = int(change.what.split("=")[1].split()[0])
    after = trained(folder / "b", layers(), [1, 1], chunks=count, checkpoint="never")
    return Kept("larger micro-batches", change, before[0], after[0])


class _Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.ones(4)


def data_loading(folder: Path) -> Kept:
    """Samples that take 3 ms each, before every step."""
    layers = lambda: [Sleeping(each=2) for _ in range(2)]
    loaders = [DataLoader(_Slow(), SAMPLES), DataLoader(_Slow(), SAMPLES, num_workers=1, prefetch_factor=2)]
    runs = [
        trained(folder / str(k), layers(), [1, 1], chunks=4, checkpoint="never", data=loader)
        for k, loader in enumerate(loaders)
    ]
    return kept("data loading", "load data in the background", *runs)


def loss_inside(folder: Path) -> Kept:
    """A loss that takes 3 ms a sample, after all forwards."""
    layers = lambda: [Sleeping(each=3), Sleeping(each=1)]
    slow = lambda output: Sleeping(each=1, back=(0, 1)).requires_grad_(False)(output).sum()
    before = trained(folder / "a", layers(), [1, 1], chunks=4, checkpoint="never", loss=slow)
    inside = [*layers(), Sleeping(each=1, back=(0, 1))]
    after = trained(folder / "b", inside, [1, 2], chunks=4, checkpoint="never")
    return kept("loss inside the pipe", "shorten the work between forward and backward", before, after)


def fewer_partitions(folder: Path) -> Kept:
    """Six partitions on two processors, which lose time whenever another thread takes over."""

    def layers():
        work = Processors(2).work
        return [Sleeping(each=3, work=work) for _ in range(6)]

    before = trained(folder / "a", layers(), [1] * 6, chunks=8, checkpoint="never", processors=2)
    after = trained(folder / "b", layers(), [3, 3], chunks=8, checkpoint="never", processors=2)
    return kept("fewer partitions", "2 partitions instead of 6: balance=[3, 3]", before, after)


RANKS = """
import pipesight
from support.promising import Sleeping
def train(name, schedule):
    layers = [Sleeping(each=15, back=(0, 5)), Sleeping(each=5, back=(0, 15))]
    pipeline = DistributedPipeline(
        nn.Sequential(*layers), [1, 1], chunks=8, schedule=schedule, loss_fn=nn.functional.mse_loss
    )
    begins, x = [], torch.ones(8, 4)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    with pipesight.observe(os.path.join(folder, name)):
        for _ in range(5):
            begins.append(time.perf_counter())
            optimizer.zero_grad()
            pipeline.step(x, x)
            optimizer.step()
        begins.append(time.perf_counter())
    if rank == 0:
        step = min(b - a for a, b in zip(begins, begins[1:]))
        open(os.path.join(folder, name + ".txt"), "w").write(str(step))
"""


def schedule(folder: Path) -> Kept:
    """Two ranks: the first takes long forward, the second backward."""
    torchrun(2, 'train("a", "gpipe"); train("b", "1f1b")', folder, begin=RANK + RANKS)
    before, after = (float((folder / f"{name}.txt").read_text()) for name in "ab")
    return kept("schedule", 'schedule="1f1b" instead of "gpipe"', (before, folder / "a"), (after, folder / "b"))


CASES: tuple[Callable[[Path], Kept], ...] = (
    balance,
    chunks,
    checkpoint,
    schedule,
    larger_microbatches,
    data_loading,
    loss_inside,
    fewer_partitions,
)


def main(names: list[str]) -> None:
    """Print a row for each kind of advice: medians, and the least and the most, over rounds through all of them."""
    torch.set_num_threads(1)
    found: dict[str, list[Kept]] = {}
    for _ in range(ROUNDS):
        for case in [case for case in CASES if case.__name__ in names or not names]:
            with tempfile.TemporaryDirectory() as folder, contextlib.suppress(LookupError):
                found.setdefault(case.__name__, []).append(case(Path(folder)))
    print("| advice | runs | estimated | measured |\n|---|---|---|---|")
    for rounds in found.values():
        change = rounds[-1].change
        word = "" if change.promise == "simulated" else f"{change.promise} "
        promised, measured = ([getattr(kept, name) for kept in rounds] for name in ("promised", "measured"))
        print(f"| {change.what} | {len(rounds)} | {word}{_spread(promised)} | {_spread(measured)} |", flush=True)


def _spread(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"


if __name__ == "__main__":
    main(sys.argv[1:])
