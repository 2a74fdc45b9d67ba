"""Uneven micro-batches: what a step loses to them, and how much of it another order and packed samples give back.

Layers sleep in proportion to the length of each sample, in four partitions of one process, so no processor is needed.
"""

import random
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn

import pipesight
from benchmarks.harness import Options
from benchmarks.tables import Cell, Spread, Table, publish, show_limit
from pipesight.balance import pack
from pipesight.report import analyse, open_run

__all__ = ["run"]

PARTITIONS, CHUNKS, SAMPLES = 4, 8, 2  # samples of a micro-batch
FORWARD, BACKWARD = 0.004, 0.008  # seconds of a sample of length 1
HALF = 0.5
WAYS = ("as they come", "the longest micro-batches in the middle", "packed", "all the same")


class Sleep(torch.autograd.Function):
    """Passes samples on after as long as their first column says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.length = float(x[:, 0].sum())
        time.sleep(FORWARD * ctx.length)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(BACKWARD * ctx.length)
        return gradients[0]


class Layer(nn.Module):
    """Sleeps, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep as long as the samples are."""
        return Sleep.apply(x * self.weight)  # type: ignore[no-any-return,no-untyped-call]


def lengths_of(number: int) -> list[float]:
    """Return the lengths of a batch's samples: some much longer than others."""
    dice = random.Random(number)
    return [0.5 + 6 * dice.random() ** 4 for _ in range(CHUNKS * SAMPLES)]


def arranged(lengths: list[float], way: str) -> list[float]:
    """Return the lengths of the samples in another order, or all the same."""
    if way == "packed":
        return [lengths[k] for k in pack(lengths, CHUNKS)]
    if way == "all the same":
        return [sum(lengths) / len(lengths)] * len(lengths)
    cut = [lengths[k : k + SAMPLES] for k in range(0, len(lengths), SAMPLES)]
    order = range(CHUNKS) if way == "as they come" else pack(map(sum, cut), CHUNKS)
    return [length for i in order for length in cut[i]]


def run(options: Options) -> bool:
    """Time all ways in turn, batch by batch; return whether they could be."""
    batches, rounds = {"quick": 2, "brief": 6, "full": 16}[options.size], options.rounds(7)
    layers = nn.Sequential(*(Layer() for _ in range(PARTITIONS)))
    pipe = pipesight.Pipeline(
        layers,
        balance=[1] * PARTITIONS,
        devices=["cpu"] * PARTITIONS,
        chunks=CHUNKS,
        schedule="1f1b",
        checkpoint="never",
        loss_fn=lambda output, _: output.square().mean(),
    )

    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)  # so that a recording has steps

    def step(way: str, number: int) -> float:
        x = torch.tensor(arranged(lengths_of(number), way))[:, None]
        begin = time.perf_counter()
        pipe.step(x, x)
        optimizer.step()
        return time.perf_counter() - begin

    step(WAYS[0], 0)
    times = [
        {way: sum(step(way, number) for number in range(batches)) / batches for way in WAYS} for _ in range(rounds)
    ]
    with tempfile.TemporaryDirectory(prefix="pipesight-uneven-") as folder:
        with pipesight.observe(folder, overwrite=True):
            for number in range(max(batches, 6)):
                step(WAYS[0], number)
        with open_run(folder) as opened:
            found = analyse(opened).what_if
    rows: list[list[Cell]] = []
    for way in WAYS:
        spent = Spread.over([took[way] * 1e3 for took in times])
        back = [(took[WAYS[0]] - took[way]) / (took[WAYS[0]] - took[WAYS[-1]]) for took in times]
        rows.append([way, spent, None if way == WAYS[0] else Spread.over(back)])
    loss = Spread.over([took[WAYS[0]] / took[WAYS[-1]] - 1 for took in times])
    note = f"{PARTITIONS} partitions, {CHUNKS} micro-batches of {SAMPLES} samples, 1F1B; lost: {loss} of an even step."
    if found is not None and found.reordered is not None:
        saved = 1 - found.reordered / found.replayed
        note += f" By the report, {found.verdict.partition('. ')[2]} Their order alone saves {saved:.0%} of the step."
    publish(Table("Uneven micro-batches", ["samples", "ms per step", "of the loss, given back"], rows, note))
    for row in rows[1:-1]:
        assert isinstance(row[2], Spread)
        show_limit(f"loss given back, {row[0]}", row[2].median, HALF, met=row[2].median >= HALF, least=True)
    return True
