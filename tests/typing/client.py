"""A program of a user, for mypy alone: what it sees of the public names. Nothing runs this file.

An ``ignore`` here is an error that mypy must report; strict mode fails where one is no longer needed.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Literal, assert_type

import torch
from torch import Tensor, nn

import pipesight
from pipesight import GPipe
from pipesight.trace import ai

__all__: list[str] = []

Mode = Literal["always", "except_last", "never"]


def one_process(layers: nn.Sequential, batches: list[tuple[Tensor, int]]) -> None:
    balance = pipesight.balance.balance_by_time(layers, torch.rand(8, 64), partitions=2)
    assert_type(balance, list[int])
    model = GPipe(layers, balance, chunks=4, checkpoint="never")
    assert_type(model.checkpoint, Mode)
    model.checkpoint = "always"
    model.checkpoint = "sometimes"  # type: ignore[assignment]
    GPipe(layers, balance, checkpoint="sometimes")  # type: ignore[arg-type]
    with pipesight.observe("run", steps=(10, 20)):
        for batch, label in ai.dataloader.fetch.iter(batches):
            assert_type(batch, Tensor)
            assert_type(label, int)


async def streamed(batches: AsyncIterable[Tensor]) -> None:
    async for batch in ai.dataloader.fetch(epoch=1).iter(batches):
        assert_type(batch, Tensor)


def many_processes(layers: nn.Sequential, batch: Tensor, target: Tensor) -> None:
    pipeline = pipesight.distributed.DistributedPipeline(
        layers, [2, 2], chunks=4, loss_fn=nn.functional.mse_loss, checkpoint="except_last", data_parallel="fsdp"
    )
    assert_type(pipeline.checkpoint, Mode)
    assert_type(pipeline.step(batch, target), Tensor | None)
    pipesight.distributed.DistributedPipeline(
        layers,
        [2, 2],
        chunks=4,
        loss_fn=nn.functional.mse_loss,
        checkpoint="last",  # type: ignore[arg-type]
        data_parallel="zero",  # type: ignore[arg-type]
    )


@ai.compute.forward
def decorated(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


@ai.compute.backward(args={"layer": 3})
def decorated_with_arguments(x: Tensor) -> Tensor:
    return decorated(x, scale="2")  # type: ignore[arg-type]


def reading() -> None:
    with pipesight.report.open_run("run") as run:
        report = pipesight.report.analyse(run)
    assert_type(report, pipesight.report.Report)
    assert_type(pipesight.plan.gpipe(2, 4), pipesight.plan.Schedule)
    assert_type(pipesight.stats.watch(nn.Linear(2, 2)), pipesight.stats.Watch)
    items: Iterable[str] = ai.data.item.iter(["a", "b"])
    assert_type(next(iter(items)), str)
